"""The whole network: embeddings, decoder layers with DeepStack, the head, and the vision tower beside them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from models.attention import Attention
from models.cache import KVCache
from models.config import ModelConfig, TextConfig
from models.layers import Embedding, GatedMLP, Linear, RMSNorm, StoredMatrix, products
from models.moe import Experts, MoeBlock
from models.rope import RotaryTable, Rotation
from models.switches import Switches
from models.vision import VisionTower


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VisualTokens:
    """What the vision tower contributes to a stretch of tokens: `mask` `[batch, length]` tells which tokens are visual,
    `embeddings` `[batch, length, hidden]` replace theirs, `deepstack` `[taps, batch, length, hidden]` is added to their
    hidden state after decoder layers 0, 1, ...; the rows of text tokens are not read."""

    mask: Bool[Array, "batch length"]
    embeddings: Float[Array, "batch length hidden"]
    deepstack: Float[Array, "taps batch length hidden"]


class DecoderLayer(nnx.Module):
    """Pre-norm attention and MLP (dense or mixture of experts), each with a residual connection."""

    def __init__(self, config: TextConfig, layer: int, switches: Switches) -> None:
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config, layer, switches)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        if config.moe is not None and layer in config.moe_layers:
            self.mlp = MoeBlock(config.moe, config.hidden)
        else:
            self.mlp = GatedMLP(config.hidden, config.intermediate)

    def __call__(
        self, x: Float[Array, "batch length hidden"], rotation: Rotation, cache: KVCache | None
    ) -> tuple[Float[Array, "batch length hidden"], KVCache | None]:
        mixed, cache = self.self_attn(x, self.input_layernorm, rotation, cache)
        x = x + mixed
        return x + self.mlp(x, self.post_attention_layernorm), cache


class Network(nnx.Module):
    """Any model of the Qwen3, Qwen3-MoE, Qwen3-VL and Qwen3-VL-MoE families."""

    def __init__(self, config: ModelConfig, switches: Switches) -> None:
        text = config.text
        self.embed_tokens = Embedding(text.vocab, text.hidden)
        self.layers = nnx.List([DecoderLayer(text, layer, switches) for layer in range(text.layers)])
        self.norm = RMSNorm(text.hidden, text.norm_eps)
        self.lm_head = None if config.tied else Linear(text.hidden, text.vocab)
        self.visual = VisionTower(config.vision, switches) if config.vision else None
        self.rotary = RotaryTable(text.rope, text.head_dim, switches)
        self.deepstack = switches.deepstack

    def __call__(
        self,
        token_ids: Int[Array, "batch length"],
        positions: Int[Array, "3 batch length"],
        cache: KVCache | None,
        visual: VisualTokens | None,
    ) -> tuple[Float[Array, "batch length hidden"], KVCache | None]:
        """Hidden states after the last layer, not normed, float32, and the cache with the new tokens stored, though not
        yet counted."""
        x = self.embed_tokens(token_ids)
        if visual is not None:
            x = jnp.where(visual.mask[..., None], visual.embeddings, x)
        rotation = self.rotary(positions)
        for index, layer in enumerate(self.layers):
            x, cache = layer(x, rotation, cache)
            if visual is not None and self.deepstack and index < visual.deepstack.shape[0]:
                x = jnp.where(visual.mask[..., None], x + visual.deepstack[index], x)
        return x, cache

    @property
    def row_by_row(self) -> bool:
        """Whether a token's result in the decoder layers is the same, to the last bit, with any number of tokens."""
        parts = (part for _, part in nnx.iter_graph(self.layers))
        return all(part.row_by_row for part in parts if isinstance(part, StoredMatrix | Experts))

    def logits(self, hidden: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Float32 logits of hidden states after the last layer, which are normed first."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return products(hidden, head, norm=self.norm)[0]
