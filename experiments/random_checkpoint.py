"""A checkpoint of random weights in the shape of a preset, as `models.convert` would leave it.

It is written tensor by tensor, so that a shape can be measured whose float weights memory would not hold.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import numpy as np
from tqdm import tqdm

from experiments.bench_steps import config_of
from models.checkpoint import SINGLE_FILE
from models.convert import CONFIG_FILE, Parameter, lay_out, reserve, write_at
from models.presets import preset
from models.quantisation import find_scheme, scale_name
from models.switches import Switches
from models.weights import float_parameters, published_name, published_shape, random_value


def write_random_checkpoint(model: str, quant: str, folder: Path, seed: int = 0) -> None:
    """Writes the preset `model`, quantised with the scheme `quant`, into the new folder `folder`.

    Raises:
        CheckpointError: the disk has no room.
    """
    config, scheme = config_of(model), find_scheme(quant)
    floats = float_parameters(config, Switches())
    parameters, paths = [], {}
    for path, like in floats.items():
        name, format = published_name(path, config), scheme.format_of(path)
        shape = published_shape(path, like.shape, config) if format is None else like.shape
        parameters.append(Parameter(name, shape, format))
        paths |= {name: path, scale_name(name): scale_name(path)}
    folder.mkdir()
    file = folder / SINGLE_FILE
    header, tensors, size = lay_out(file, parameters)
    with file.open("wb") as stream:
        reserve(stream.fileno(), file, size)
        write_at(stream.fileno(), np.frombuffer(header, np.uint8), 0)
        for name, stored in tqdm(tensors.items(), desc="random weights", unit="tensor", delay=1, leave=False):
            path = paths[name]
            shape = floats[path].shape if stored.dtype == np.float32 else stored.shape
            like = jax.ShapeDtypeStruct(shape, stored.dtype)
            write_at(stream.fileno(), random_value(path, like, seed, scheme), stored.start)
        os.fsync(stream.fileno())  # only what is on the disk can leave the page cache
    entries = preset(model) | {"quantization_config": scheme.config_entry()}
    (folder / CONFIG_FILE).write_text(json.dumps(entries))
