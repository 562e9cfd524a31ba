"""The vision tower: patches of one frame in, embeddings for the decoder and DeepStack features out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models.config import VisionConfig
from models.layers import Embedding, LayerNorm, Linear
from models.rope import rotate
from models.switches import Switches

NORM_EPS = 1e-6
ROPE_THETA = 10000.0
QUERY_BLOCK = 512  # query patches per attention block: bounds the score matrix of a large picture


@dataclass(frozen=True)
class PatchLayout:
    """Where the patches of one frame lie, in merge-block order: row and column `[patches]`, and the four entries of the
    learned position table `[patches, 4]` with their bilinear weights `[patches, 4]`."""

    rows: np.ndarray
    columns: np.ndarray
    table_index: np.ndarray
    table_weight: np.ndarray


@lru_cache(maxsize=64)
def patch_layout(height: int, width: int, merge: int, side: int) -> PatchLayout:
    """The layout of a frame of `height` x `width` patches over a position table of `side` x `side` entries.

    The patches of one `merge` x `merge` block follow each other. Table positions span the whole table whatever the
    picture's size (corners aligned).
    """
    blocks = np.arange(height * width, dtype=np.int32).reshape(height // merge, merge, width // merge, merge)
    rows, columns = np.divmod(blocks.transpose(0, 2, 1, 3).reshape(-1), width)
    row_taps, row_weights = _taps(rows, height, side)
    column_taps, column_weights = _taps(columns, width, side)
    index = row_taps[:, :, None] * side + column_taps[:, None, :]
    weight = row_weights[:, :, None] * column_weights[:, None, :]
    return PatchLayout(rows, columns, index.reshape(-1, 4), weight.reshape(-1, 4))


def _taps(position: np.ndarray, count: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """The two table lines around each of `count` evenly spread positions, and their weights; each `[patches, 2]`."""
    source = np.linspace(0, side - 1, count, dtype=np.float32)[position]
    low = source.astype(np.int32)
    high = np.minimum(low + 1, side - 1)
    fraction = source - low.astype(np.float32)
    return np.stack([low, high], axis=1), np.stack([1 - fraction, fraction], axis=1)


class VisionAttention(nnx.Module):
    """Full attention among the patches of a frame."""

    def __init__(self, config: VisionConfig) -> None:
        self.qkv = Linear(config.hidden, 3 * config.hidden, bias=True)
        self.proj = Linear(config.hidden, config.hidden, bias=True)
        self.heads = config.heads

    def __call__(
        self,
        x: Float[Array, "frames patches hidden"],
        rotation: tuple[Array, Array],
        valid: Bool[Array, "frames patches"],
    ) -> Float[Array, "frames patches hidden"]:
        frames, patches, hidden = x.shape
        qkv = self.qkv(x).reshape(frames, patches, 3, self.heads, -1)
        q, k, v = rotate(qkv[:, :, 0], *rotation), rotate(qkv[:, :, 1], *rotation), qkv[:, :, 2]
        attend = partial(_attend, k=k, v=v, valid=valid)
        if patches > QUERY_BLOCK and patches % QUERY_BLOCK == 0:
            blocks = q.reshape(frames, -1, QUERY_BLOCK, *q.shape[2:]).swapaxes(0, 1)
            mixed = jax.lax.map(attend, blocks).swapaxes(0, 1)
        else:
            mixed = attend(q)
        return self.proj(mixed.reshape(frames, patches, hidden))


def _attend(
    q: Float[Array, "frames queries heads head_dim"],
    k: Float[Array, "frames patches heads head_dim"],
    v: Float[Array, "frames patches heads head_dim"],
    valid: Bool[Array, "frames patches"],
) -> Float[Array, "frames queries heads head_dim"]:
    scores = jnp.einsum("fqhd,fphd->fhqp", q, k) * q.shape[-1] ** -0.5
    scores = jnp.where(valid[:, None, None, :], scores, -jnp.inf)
    return jnp.einsum("fhqp,fphd->fqhd", jax.nn.softmax(scores, axis=-1), v)


class VisionMLP(nnx.Module):
    """The two-layer MLP of a block."""

    def __init__(self, config: VisionConfig) -> None:
        self.linear_fc1 = Linear(config.hidden, config.intermediate, bias=True)
        self.linear_fc2 = Linear(config.intermediate, config.hidden, bias=True)
        self.tanh = config.activation == "gelu_pytorch_tanh"

    def __call__(self, x: Float[Array, "frames patches hidden"]) -> Float[Array, "frames patches hidden"]:
        return self.linear_fc2(jax.nn.gelu(self.linear_fc1(x), approximate=self.tanh))


class VisionBlock(nnx.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: VisionConfig) -> None:
        self.norm1 = LayerNorm(config.hidden, NORM_EPS)
        self.norm2 = LayerNorm(config.hidden, NORM_EPS)
        self.attn = VisionAttention(config)
        self.mlp = VisionMLP(config)

    def __call__(
        self,
        x: Float[Array, "frames patches hidden"],
        rotation: tuple[Array, Array],
        valid: Bool[Array, "frames patches"],
    ) -> Float[Array, "frames patches hidden"]:
        x = x + self.attn(self.norm1(x), rotation, valid)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nnx.Module):
    """Joins each merge block into one token of the decoder's width. The main merger norms single patches, a DeepStack
    merger the joined block."""

    def __init__(self, config: VisionConfig, *, norm_joined: bool, exact_gelu: bool) -> None:
        self.joined = config.hidden * config.merge**2
        self.norm = LayerNorm(self.joined if norm_joined else config.hidden, NORM_EPS)
        self.linear_fc1 = Linear(self.joined, self.joined, bias=True)
        self.linear_fc2 = Linear(self.joined, config.out_hidden, bias=True)
        self.norm_joined = norm_joined
        self.exact_gelu = exact_gelu

    def __call__(self, x: Float[Array, "frames patches hidden"]) -> Float[Array, "frames tokens out_hidden"]:
        shape = (x.shape[0], -1, self.joined)
        x = self.norm(x.reshape(shape)) if self.norm_joined else self.norm(x).reshape(shape)
        return self.linear_fc2(jax.nn.gelu(self.linear_fc1(x), approximate=not self.exact_gelu))


class VisionTower(nnx.Module):
    """Patch embedding, learned and rotary positions, transformer blocks, and the mergers that leave it."""

    def __init__(self, config: VisionConfig, switches: Switches) -> None:
        self.patch_embed = Linear(config.patch_values, config.hidden, bias=True)
        self.pos_embed = Embedding(config.positions**2, config.hidden)
        self.blocks = nnx.List([VisionBlock(config) for _ in range(config.depth)])
        exact = switches.exact_merger_gelu
        self.merger = PatchMerger(config, norm_joined=False, exact_gelu=exact)
        self.deepstack_merger_list = nnx.List(
            [PatchMerger(config, norm_joined=True, exact_gelu=exact) for _ in config.deepstack]
        )
        self.taps = tuple(block + switches.deepstack_offset for block in config.deepstack)
        self.head_dim = config.hidden // config.heads

    def __call__(
        self,
        patches: Float[Array, "frames patches values"],
        rows: Int[Array, "frames patches"],
        columns: Int[Array, "frames patches"],
        table_index: Int[Array, "frames patches 4"],
        table_weight: Float[Array, "frames patches 4"],
        valid: Bool[Array, "frames patches"],
    ) -> tuple[Float[Array, "frames tokens out_hidden"], Float[Array, "taps frames tokens out_hidden"]]:
        """Embeddings and DeepStack features of each frame, float32; patches that are not `valid` are padding."""
        x = self.patch_embed(patches)
        x = x + jnp.sum(self.pos_embed(table_index) * table_weight[..., None], axis=2)
        rotation = self._rotation(rows, columns)
        tapped = {}
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, valid)
            tapped[index] = x
        features = [merge(tapped[tap]) for merge, tap in zip(self.deepstack_merger_list, self.taps, strict=True)]
        embeddings = self.merger(x)
        return embeddings, jnp.stack(features) if features else jnp.zeros((0, *embeddings.shape), embeddings.dtype)

    def _rotation(
        self, rows: Int[Array, "frames patches"], columns: Int[Array, "frames patches"]
    ) -> tuple[Array, Array]:
        """Half of the frequencies turn with the row, half with the column."""
        quarter = np.arange(0, self.head_dim // 2, 2, dtype=np.float32) / np.float32(self.head_dim // 2)
        frequencies = jnp.asarray(1.0 / np.float32(ROPE_THETA) ** quarter)[None, None, :]
        by_row = rows.astype(jnp.float32)[:, :, None] * frequencies
        by_column = columns.astype(jnp.float32)[:, :, None] * frequencies
        angles = jnp.concatenate([by_row, by_column], axis=-1)
        return jnp.cos(angles), jnp.sin(angles)
