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
from models.config import ModelConfig
from models.errors import CheckpointError, ConfigError
from models.huge_pages import HugePages, is_mapped_file
from models.layers import StoredMatrix
from models.moe import Experts
from models.network import Network
from models.quantisation import GROUP, SCHEMES, Scheme, quantise, scale_name, weight_name
from models.switches import Switches

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
RANDOM_BLOCK = 1_000_003  # a prime: repeated blocks of random numbers never line up with a row
EMBEDDING_SCALE = 0.02
UNIFORM_SPREAD = {"q4": 4.6, "q8": 73.3}  # the standard deviation of a format's whole numbers, all equally likely
QUANTISED_DTYPES = (np.dtype(np.uint8), np.dtype(np.int8), np.dtype(np.float16))
FLOAT32 = np.dtype(np.float32)

# Reads the value of the parameter at a dotted path of the network, given its shape and dtype.
Source = Callable[[str, jax.ShapeDtypeStruct], np.ndarray]


def load_network(
    checkpoint: Checkpoint,
    config: ModelConfig,
    dtype: str,
    switches: Switches,
    scheme: Scheme | None = None,
    *,
    mapped: bool = True,
) -> Network:
    """The network with the weights of `checkpoint`; matrices are kept in `dtype`, norms and biases in float32.

    With a `scheme` matrices are kept quantised. Those of a checkpoint that was converted with it are arrays over its
    mapped file, or copies of it (`mapped=False`); those of any other are quantised as they are read.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the configuration gives it, or belongs to no part.
    """
    read = CheckpointSource(checkpoint, config)
    source: Source = read
    if scheme is not None and not stored_scheme(checkpoint):
        source = _QuantisingSource(read, float_parameters(config, switches), scheme)
    network = fill_network(config, dtype, switches, source, scheme, mapped=mapped)
    read.refuse_leftovers()
    return network


def stored_scheme(checkpoint: Checkpoint) -> Scheme | None:
    """The scheme that the checkpoint was converted with; None for float weights.

    Raises:
        CheckpointError: it was quantised in some other way.
    """
    entry = checkpoint.config.get("quantization_config")
    if entry is None:
        return None
    scheme = SCHEMES.get(str(entry.get("scheme"))) if isinstance(entry, dict) else None
    if scheme is None or entry != scheme.config_entry():
        raise CheckpointError(
            f"{checkpoint.folder / 'config.json'}: its quantization_config {entry!r} is none that can be read; use the "
            "float weights, or what python -m models.convert makes of them"
        )
    return scheme


def random_network(
    config: ModelConfig, dtype: str, switches: Switches, seed: int = 0, scheme: Scheme | None = None
) -> Network:
    """The network with random weights of a sensible scale, the same for the same seed."""
    return fill_network(config, dtype, switches, lambda path, like: random_value(path, like, seed, scheme), scheme)


def fill_network(
    config: ModelConfig,
    dtype: str,
    switches: Switches,
    source: Source,
    scheme: Scheme | None = None,
    *,
    mapped: bool = True,
) -> Network:
    """Builds the network parameter by parameter, so that no more than one tensor is held twice. Arrays over a mapped
    file stay there if `mapped`; all others go to huge pages."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, found {dtype!r}")
    graph, state = nnx.split(_unfilled_network(config, switches, scheme))
    filled, pages = [], HugePages()
    bar = tqdm(nnx.to_flat_state(state), desc="weights", unit="tensor", delay=1, leave=False, disable=None)
    for path, parameter in bar:
        abstract = parameter.get_value()
        kept = DTYPES[dtype] if abstract.ndim > 1 and abstract.dtype == jnp.float32 else abstract.dtype
        value = source(".".join(map(str, path)), jax.ShapeDtypeStruct(abstract.shape, kept))
        value = value.astype(kept, copy=False)
        value = np.ascontiguousarray(value) if mapped and is_mapped_file(value) else pages.copy(value)
        filled.append((path, parameter.replace(jax.device_put(value))))
    return nnx.merge(graph, nnx.from_flat_state(filled))


def _unfilled_network(config: ModelConfig, switches: Switches, scheme: Scheme | None) -> Network:
    """The network without values, its matrices in the formats of `scheme`."""
    network = Network(config, switches)
    for path, module in nnx.iter_modules(network):
        if scheme is not None and isinstance(module, (StoredMatrix, Experts)):
            format = scheme.format_of(".".join(map(str, (*path, "weight"))))
            if format is not None:
                module.store_as(format)
    return network


def float_parameters(config: ModelConfig, switches: Switches) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every parameter of the float32 network by its dotted path."""
    state = nnx.state(_unfilled_network(config, switches, None))
    return {".".join(map(str, path)): parameter.get_value() for path, parameter in nnx.to_flat_state(state)}


class _QuantisingSource:
    """Quantises what another source reads. A matrix and its scale are asked for separately but made together, so the
    last one is kept until both have been taken."""

    def __init__(self, read: Source, floats: dict[str, jax.ShapeDtypeStruct], scheme: Scheme) -> None:
        self.read = read
        self.floats = floats
        self.scheme = scheme
        self.pending: dict[str, np.ndarray] = {}

    def __call__(self, path: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
        if path not in self.pending:
            matrix = path if path in self.floats else weight_name(path)
            format = self.scheme.format_of(matrix)
            if format is None:
                return self.read(path, like)
            value = self.read(matrix, jax.ShapeDtypeStruct(self.floats[matrix].shape, jnp.float32))
            quantised = quantise(value, format, matrix)
            self.pending = {matrix: quantised.weight, scale_name(matrix): quantised.scale}
        return self.pending.pop(path)


def published_name(path: str, config: ModelConfig) -> str:
    """The checkpoint's name of the parameter at `path`; experts stand under their fused name."""
    if path.startswith("lm_head."):
        return path
    path = path.replace("patch_embed.", "patch_embed.proj.")
    if config.vision is None or path.startswith("visual."):
        return f"model.{path}"
    return f"model.language_model.{path}"


def published_shape(path: str, shape: tuple[int, ...], config: ModelConfig) -> tuple[int, ...]:
    """The checkpoint's shape of the parameter at `path`, of `shape`, if it is no expert's: the patch embedding is
    published as a convolution."""
    vision = config.vision
    if vision is None or not path.endswith("patch_embed.weight"):
        return shape
    return (vision.hidden, vision.channels, vision.temporal_patch, vision.patch, vision.patch)


def expert_tensors(name: str, expert: int) -> list[str]:
    """The tensors of one expert in a checkpoint that stores experts one by one, top down, under the fused `name`."""
    stem, part = name.rsplit(".", 1)
    projections = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return [f"{stem}.{expert}.{projection}.weight" for projection in projections]


class CheckpointSource:
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
            return self._tensor(name, published_shape(path, like.shape, self.config)).reshape(like.shape)
        if name == "lm_head.weight" and name not in self.unread:
            raise CheckpointError(
                f"{self.checkpoint.folder}: tensor 'lm_head.weight' is missing, but config.json does not tie the head "
                "to the embeddings (tie_word_embeddings)"
            )
        return self._tensor(name, like.shape, like.dtype)

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: np.dtype = FLOAT32) -> np.ndarray:
        if name not in self.checkpoint.names():
            raise CheckpointError(f"{self.checkpoint.folder}: tensor '{name}' {shape} is missing")
        found = self.checkpoint.shape(name)
        if found != shape:
            file = self.checkpoint.file(name)
            raise CheckpointError(f"{file}: tensor '{name}' has shape {found}; config.json makes it {shape}")
        stored = self.checkpoint.dtype(name)
        if dtype != stored if dtype in QUANTISED_DTYPES else not jnp.issubdtype(stored, jnp.floating):
            wanted = dtype.name if dtype in QUANTISED_DTYPES else "float32, float16 or bfloat16"
            raise CheckpointError(f"{self.checkpoint.file(name)}: tensor '{name}' is {stored}; it should be {wanted}")
        self.unread.discard(name)
        return self.checkpoint.read(name)

    def _experts(self, name: str, like: jax.ShapeDtypeStruct) -> np.ndarray:
        """Stacked experts `[experts, out, in]`: published either fused as `[experts, in, out]`, or one by one.

        transformers 5 saves fused experts as `[experts, out, in]`, and reads them so where the shape allows both.
        """
        if like.dtype in QUANTISED_DTYPES:
            return self._tensor(name, like.shape, like.dtype)
        experts, rows, columns = like.shape
        if name in self.checkpoint.names():
            if self.checkpoint.shape(name) == like.shape:
                return self._tensor(name, like.shape)
            return self._tensor(name, (experts, columns, rows)).swapaxes(1, 2)
        stacked = np.empty(like.shape, like.dtype)
        for expert in range(experts):
            np.concatenate(self.expert(name, expert, (rows, columns)), out=stacked[expert], casting="same_kind")
        return stacked

    def expert(self, name: str, expert: int, shape: tuple[int, int]) -> list[np.ndarray]:
        """The matrices that stand on each other in the matrix `[out, in]` of one expert, stored one by one."""
        tensors = expert_tensors(name, expert)
        rows, columns = shape
        return [self._tensor(tensor, (rows // len(tensors), columns)) for tensor in tensors]

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


def random_value(path: str, like: jax.ShapeDtypeStruct, seed: int, scheme: Scheme | None) -> np.ndarray:
    """Random values for the parameter at `path`, or for the blocks or the scale of a quantised one: of a sensible
    spread, the same for the same path and seed."""
    if path.endswith("bias"):
        return np.zeros(like.shape, np.float32)
    if len(like.shape) == 1:
        return np.ones(like.shape, np.float32)
    random = np.random.default_rng([seed, zlib.crc32(path.encode())])
    size = min(math.prod(like.shape), RANDOM_BLOCK)
    if like.dtype == jnp.uint8:
        block = random.integers(0, 256, size, np.uint8)
    elif like.dtype == jnp.int8:
        block = random.integers(-127, 128, size, np.int8)
    elif like.dtype == jnp.float16:
        spread = UNIFORM_SPREAD[scheme.format_of(weight_name(path))]
        scale = _random_scale(path, like.shape[-2] * GROUP) / spread
        return np.full(like.shape, scale, np.float16)
    else:
        block = random.standard_normal(size, np.float32) * np.float32(_random_scale(path, like.shape[-1]))
    return np.resize(block.astype(like.dtype), like.shape)


def _random_scale(path: str, inputs: int) -> float:
    """The standard deviation of random weights."""
    return EMBEDDING_SCALE if "embed" in path else inputs**-0.5


def save_weights(network: Network, config: ModelConfig, folder: Path, dtype: str) -> None:
    """Writes `model.safetensors` in `dtype`, under the published names and in the published layouts."""
    tensors: dict[str, np.ndarray] = {}
    for path, parameter in nnx.to_flat_state(nnx.state(network)):
        tensors |= _published_tensors(".".join(map(str, path)), parameter.get_value(), config)
    narrow = {name: np.ascontiguousarray(tensor.astype(DTYPES[dtype])) for name, tensor in tensors.items()}
    save_file(narrow, folder / "model.safetensors", metadata={"format": "pt"})


def _published_tensors(path: str, value: Array, config: ModelConfig) -> dict[str, Any]:
    """One parameter as the checkpoint's tensors: experts fused for the vision-language family, else one by one."""
    name, tensor = published_name(path, config), np.asarray(value)
    if ".experts." not in name:
        return {name: tensor.reshape(published_shape(path, tensor.shape, config))}
    if config.vision is not None:
        return {name: tensor.swapaxes(1, 2)}
    tensors: dict[str, Any] = {}
    for expert, matrix in enumerate(tensor):
        names = expert_tensors(name, expert)
        tensors |= zip(names, np.split(matrix, len(names)), strict=True)
    return tensors
