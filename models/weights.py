"""Fills a network with weights: from a checkpoint under its published tensor names, or with random numbers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array
from safetensors.numpy import save_file
from tqdm import tqdm

from models.checkpoint import Checkpoint
from models.config import ModelConfig, VisionConfig
from models.errors import CheckpointError, ConfigError
from models.network import Network
from models.switches import Switches

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
RANDOM_BLOCK = 1_000_003  # a prime: repeated blocks of random numbers never line up with a row
EMBEDDING_SCALE = 0.02

# Reads the value of the parameter at a dotted path of the network, given its shape and dtype.
Source = Callable[[str, jax.ShapeDtypeStruct], np.ndarray]


def load_network(checkpoint: Checkpoint, config: ModelConfig, dtype: str, switches: Switches) -> Network:
    """The network with the weights of `checkpoint`; matrices are kept in `dtype`, norms and biases in float32.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration gives it, or belongs to no part.
    """
    read = _CheckpointSource(checkpoint, config)
    network = fill_network(config, dtype, switches, read)
    read.refuse_leftovers()
    return network


def random_network(config: ModelConfig, dtype: str, switches: Switches, seed: int = 0) -> Network:
    """The network with random weights of a sensible scale, the same for the same seed."""
    return fill_network(config, dtype, switches, lambda path, like: _random_value(path, like, seed))


def fill_network(config: ModelConfig, dtype: str, switches: Switches, source: Source) -> Network:
    """Builds the network parameter by parameter, so that no more than one tensor is held twice."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    graph, state = nnx.split(nnx.eval_shape(lambda: Network(config, switches)))
    parameters = nnx.to_flat_state(state)
    filled = []
    for path, parameter in tqdm(parameters, desc="weights", unit="tensor", delay=1, leave=False):
        abstract = parameter.get_value()
        like = jax.ShapeDtypeStruct(abstract.shape, DTYPES[dtype] if abstract.ndim > 1 else jnp.float32)
        value = source(".".join(map(str, path)), like)
        filled.append((path, parameter.replace(jax.device_put(np.ascontiguousarray(value.astype(like.dtype))))))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def published_name(path: str, config: ModelConfig) -> str:
    """The checkpoint's name of the parameter at `path`; experts stand under their fused name."""
    if path.startswith("lm_head."):
        return path
    path = path.replace("patch_embed.", "patch_embed.proj.")
    if config.vision is None or path.startswith("visual."):
        return f"model.{path}"
    return f"model.language_model.{path}"


class _CheckpointSource:
    """Reads parameters from a checkpoint, checking shapes, and remembers which tensors were used."""

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.unread = set(checkpoint.names())

    def __call__(self, path: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
        name = published_name(path, self.config)
        if ".experts." in name:
            return self._experts(name, like)
        if name.endswith("patch_embed.proj.weight"):
            return self._tensor(name, _convolution_shape(self.config.vision)).reshape(like.shape)
        if name == "lm_head.weight" and name not in self.unread:
            raise CheckpointError(
                f"{self.checkpoint.folder}: tensor 'lm_head.weight' is missing, but config.json does not tie the head "
                "to the embeddings (tie_word_embeddings)"
            )
        return self._tensor(name, like.shape)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        if name not in self.checkpoint.names():
            raise CheckpointError(f"{self.checkpoint.folder}: tensor '{name}' {shape} is missing")
        found = self.checkpoint.shape(name)
        if found != shape:
            file = self.checkpoint.file(name)
            raise CheckpointError(f"{file}: tensor '{name}' has shape {found}; config.json makes it {shape}")
        if not jnp.issubdtype(self.checkpoint.dtype(name), jnp.floating):
            raise CheckpointError(
                f"{self.checkpoint.file(name)}: tensor '{name}' is {self.checkpoint.dtype(name)}; "
                "weights are float32, float16 or bfloat16"
            )
        self.unread.discard(name)
        return self.checkpoint.read(name)

    def _experts(self, name: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
        """Stacked experts `[experts, out, in]`: published either fused as `[experts, in, out]`, or one by one.

        transformers 5 saves fused experts as `[experts, out, in]`, and reads them so where the shape allows both.
        """
        experts, rows, columns = like.shape
        if name in self.checkpoint.names():
            if self.checkpoint.shape(name) == like.shape:
                return self._tensor(name, like.shape)
            return self._tensor(name, (experts, columns, rows)).swapaxes(1, 2)
        stem, part = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        stacked = np.empty(like.shape, like.dtype)
        height = rows // len(parts)
        for expert in range(experts):
            for index, projection in enumerate(parts):
                tensor = self._tensor(f"{stem}.{expert}.{projection}.weight", (height, columns))
                stacked[expert, index * height : (index + 1) * height] = tensor
        return stacked

    def refuse_leftovers(self) -> None:
        """A tensor that no part reads means that the network lacks something the checkpoint has."""
        unknown = sorted(name for name in self.unread if not self._harmless(name))
        if unknown:
            raise CheckpointError(
                f"{self.checkpoint.file(unknown[0])}: tensor '{unknown[0]}' ({len(unknown)} such) belongs to no part "
                f"of a {self.config.family} network"
            )

    def _harmless(self, name: str) -> bool:
        """A stored copy of a tied head, and frequency tables of old files, are derived from what is read."""
        return (name == "lm_head.weight" and self.config.tied) or name.endswith("rotary_emb.inv_freq")


def _convolution_shape(vision: VisionConfig) -> tuple[int, ...]:
    return (vision.hidden, vision.channels, vision.temporal_patch, vision.patch, vision.patch)


def _random_value(path: str, like: jax.ShapeDtypeStruct, seed: int) -> np.ndarray:
    if path.endswith("bias"):
        return np.zeros(like.shape, np.float32)
    if len(like.shape) == 1:
        return np.ones(like.shape, np.float32)
    scale = EMBEDDING_SCALE if "embed" in path else like.shape[-1] ** -0.5
    random = np.random.default_rng([seed, zlib.crc32(path.encode())])
    block = random.standard_normal(min(math.prod(like.shape), RANDOM_BLOCK), np.float32) * np.float32(scale)
    return np.resize(block.astype(like.dtype), like.shape)


def save_weights(network: Network, config: ModelConfig, folder: Path, dtype: str) -> None:
    """Writes `model.safetensors` in `dtype`, under the published names and in the published layouts."""
    tensors: dict[str, np.ndarray] = {}
    for path, parameter in nnx.to_flat_state(nnx.state(network)):
        name = published_name(".".join(map(str, path)), config)
        tensors |= _published_tensors(name, parameter.get_value(), config)
    narrow = {name: np.ascontiguousarray(tensor.astype(DTYPES[dtype])) for name, tensor in tensors.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})


def _published_tensors(name: str, value: Array, config: ModelConfig) -> dict[str, Any]:
    """One parameter as the checkpoint's tensors: experts fused for the vision-language family, else one by one."""
    tensor = np.asarray(value)
    if name.endswith("patch_embed.proj.weight"):
        return {name: tensor.reshape(_convolution_shape(config.vision))}
    if ".experts." not in name:
        return {name: tensor}
    if config.vision is not None:
        return {name: tensor.swapaxes(1, 2)}
    stem, part = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return {
        f"{stem}.{expert}.{projection}.weight": half
        for expert, matrix in enumerate(tensor)
        for projection, half in zip(parts, np.split(matrix, len(parts)), strict=True)
    }
