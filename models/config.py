"""What a checkpoint's `config.json` says, as typed values. No size has a default that could shadow the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from models.errors import ConfigError

VISION_TYPES = {"qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}
MOE_TYPES = frozenset({"qwen3_moe", "qwen3_vl_moe_text"})
TEXT_TYPES = frozenset({"qwen3", "qwen3_moe", *VISION_TYPES.values()})
DENSE_HEAD_DIM = 128  # of a file that does not say, in transformers; mixtures share their hidden size among the heads


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (Peng et al. 2023, arXiv:2309.00071)."""

    factor: float
    original_length: int
    beta_fast: float
    beta_slow: float
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base `theta`, YaRN where the file asks for it, frequency counts per (T, H, W) for MRoPE."""

    theta: float
    yarn: YarnConfig | None
    mrope_section: tuple[int, int, int] | None


@dataclass(frozen=True)
class MoeConfig:
    """A mixture-of-experts block: `experts` experts of width `intermediate`, `top_k` of them per token."""

    experts: int
    top_k: int
    intermediate: int
    normalise: bool


@dataclass(frozen=True)
class TextConfig:
    """The decoder. `moe_layers` holds the indices of the layers whose MLP is a mixture of experts."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: RopeConfig
    attention_bias: bool
    moe: MoeConfig | None
    moe_layers: frozenset[int]

    @property
    def longest_context(self) -> int:
        """The most tokens that fit: YaRN stretches the original length by its factor."""
        if self.rope.yarn is None:
            return self.max_positions
        return max(self.max_positions, round(self.rope.yarn.original_length * self.rope.yarn.factor))


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower. `deepstack` holds the 0-based blocks whose outputs are tapped; `positions` is the side length
    of the square table of learned positions."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    out_hidden: int
    positions: int
    deepstack: tuple[int, ...]
    activation: Literal["gelu_pytorch_tanh", "gelu"]

    @property
    def patch_values(self) -> int:
        """Values of one flattened patch: channels x temporal_patch x patch x patch."""
        return self.channels * self.temporal_patch * self.patch**2


@dataclass(frozen=True)
class ModelConfig:
    """A whole model: `family` is the file's `model_type`; `vision` is None for a text model."""

    family: str
    text: TextConfig
    vision: VisionConfig | None
    tied: bool
    image_token: int | None
    video_token: int | None
    vision_start: int | None
    vision_end: int | None


class _Fields:
    """One JSON object of the file; a field that is missing or of the wrong type is named in the error."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{where}: expected an object, found {type(values).__name__}")
        self.values = values
        self.where = where

    def get(self, name: str, kind: type, *fallback: Any) -> Any:
        """The field `name` as `kind`; without a `fallback` its absence is an error."""
        value = self.values.get(name)
        if value is None:
            if fallback:
                return fallback[0]
            raise ConfigError(f"{self.where}: field '{name}' is missing")
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{self.where}: field '{name}' must be {kind.__name__}, found {value!r}")
        return value

    def size(self, name: str, *fallback: Any) -> int:
        """A positive integer."""
        value = self.get(name, int, *fallback)
        if value is not None and value <= 0:
            raise ConfigError(f"{self.where}: field '{name}' must be positive, found {value}")
        return value


def parse_config(values: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Reads a Hugging Face `config.json` object; `where` names it in errors.

    Raises:
        ConfigError: a field is missing, of the wrong type, or asks for something these networks do not have.
    """
    fields = _Fields(values, where)
    family = fields.get("model_type", str)
    if family in VISION_TYPES:
        return _parse_vision_language(fields, family)
    if family not in TEXT_TYPES:
        known = ", ".join(sorted({*TEXT_TYPES, *VISION_TYPES}))
        raise ConfigError(f"{where}: model_type '{family}' is not one of {known}")
    tied = fields.get("tie_word_embeddings", bool, False)
    return ModelConfig(family, _parse_text(fields, family), None, tied, None, None, None, None)


def _parse_vision_language(fields: _Fields, family: str) -> ModelConfig:
    text_fields = _Fields(fields.get("text_config", dict), f"{fields.where}, text_config")
    text = _parse_text(text_fields, text_fields.get("model_type", str, VISION_TYPES[family]))
    if text.rope.mrope_section is None:
        raise ConfigError(f"{text_fields.where}: a vision-language model needs 'mrope_section' in its rope settings")
    vision = _parse_vision(_Fields(fields.get("vision_config", dict), f"{fields.where}, vision_config"))
    if vision.out_hidden != text.hidden:
        raise ConfigError(
            f"{fields.where}: vision out_hidden_size {vision.out_hidden} must equal text hidden_size {text.hidden}"
        )
    if len(vision.deepstack) > text.layers:
        raise ConfigError(f"{fields.where}: {len(vision.deepstack)} DeepStack taps, but only {text.layers} layers")
    return ModelConfig(
        family=family,
        text=text,
        vision=vision,
        # Some files carry the flag at the top, some inside text_config; the top decides where both do.
        tied=fields.get("tie_word_embeddings", bool, text_fields.get("tie_word_embeddings", bool, False)),
        image_token=fields.get("image_token_id", int),
        video_token=fields.get("video_token_id", int),
        vision_start=fields.get("vision_start_token_id", int),
        vision_end=fields.get("vision_end_token_id", int),
    )


def _parse_text(fields: _Fields, model_type: str) -> TextConfig:
    if model_type not in TEXT_TYPES:
        raise ConfigError(f"{fields.where}: model_type '{model_type}' is not one of {', '.join(sorted(TEXT_TYPES))}")
    _require(fields, "hidden_act", str, "silu")
    _require(fields, "use_sliding_window", bool, False)
    layers, hidden, heads = (
        fields.size("num_hidden_layers"),
        fields.size("hidden_size"),
        fields.size("num_attention_heads"),
    )
    kv_heads = fields.size("num_key_value_heads")
    if heads % kv_heads:
        raise ConfigError(f"{fields.where}: {heads} attention heads are not a multiple of {kv_heads} key/value heads")
    default = hidden // heads if model_type in MOE_TYPES else DENSE_HEAD_DIM
    head_dim = fields.size("head_dim", None) or default
    if head_dim % 2:
        raise ConfigError(f"{fields.where}: head_dim must be even for rotary embedding, found {head_dim}")
    moe = _parse_moe(fields, model_type) if model_type in MOE_TYPES else None
    return TextConfig(
        vocab=fields.size("vocab_size"),
        hidden=hidden,
        intermediate=fields.size("intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.get("rms_norm_eps", float),
        max_positions=fields.size("max_position_embeddings"),
        rope=_parse_rope(fields, head_dim),
        attention_bias=fields.get("attention_bias", bool, False),
        moe=moe,
        moe_layers=_moe_layers(fields, layers) if moe else frozenset(),
    )


def _require(fields: _Fields, name: str, kind: type, only: Any) -> None:
    """A field that may be absent, but whose only supported value is `only`."""
    found = fields.get(name, kind, only)
    if found != only:
        raise ConfigError(f"{fields.where}: field '{name}' is {found!r}; these networks support only {only!r}")


def _parse_moe(fields: _Fields, model_type: str) -> MoeConfig:
    experts = fields.size("num_local_experts", None) or fields.size("num_experts")  # the former in transformers 5
    top_k = fields.size("num_experts_per_tok")
    if top_k > experts:
        raise ConfigError(f"{fields.where}: num_experts_per_tok {top_k} exceeds num_experts {experts}")
    # The vision-language mixture always renormalises, whatever its file says; the text one only if the file says so.
    normalise = model_type == "qwen3_vl_moe_text" or fields.get("norm_topk_prob", bool)
    return MoeConfig(experts, top_k, fields.size("moe_intermediate_size"), normalise)


def _moe_layers(fields: _Fields, layers: int) -> frozenset[int]:
    step = fields.size("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers", list, [])
    return frozenset(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)


def _parse_rope(fields: _Fields, head_dim: int) -> RopeConfig:
    """Accepts `rope_theta` with `rope_scaling` (type under `rope_type` or `type`) and the newer `rope_parameters`."""
    name = "rope_parameters" if fields.values.get("rope_parameters") is not None else "rope_scaling"
    rope = _Fields(fields.get(name, dict, {}), f"{fields.where}, {name}")
    theta = rope.get("rope_theta", float, None) or fields.get("rope_theta", float)
    kind = rope.get("rope_type", str, None) or rope.get("type", str, "default")
    # Early Qwen2-VL style files spell the plain type "mrope".
    if kind not in ("default", "mrope", "yarn"):
        raise ConfigError(f"{rope.where}: rope type '{kind}' is not one of default, yarn")
    yarn = _parse_yarn(rope, fields) if kind == "yarn" else None
    return RopeConfig(theta, yarn, _parse_mrope_section(rope, head_dim))


def _parse_yarn(rope: _Fields, fields: _Fields) -> YarnConfig:
    original = rope.size("original_max_position_embeddings", None) or fields.size("max_position_embeddings")
    factor = rope.get("factor", float, None) or fields.size("max_position_embeddings") / original
    return YarnConfig(
        factor=factor,
        original_length=original,
        beta_fast=rope.get("beta_fast", float, None) or 32.0,
        beta_slow=rope.get("beta_slow", float, None) or 1.0,
        attention_factor=rope.get("attention_factor", float, None),
        mscale=rope.get("mscale", float, None),
        mscale_all_dim=rope.get("mscale_all_dim", float, None),
        truncate=rope.get("truncate", bool, True),
    )


def _parse_mrope_section(rope: _Fields, head_dim: int) -> tuple[int, int, int] | None:
    section = rope.get("mrope_section", list, None)
    if section is None:
        return None
    if not rope.get("mrope_interleaved", bool, False):
        raise ConfigError(f"{rope.where}: only interleaved MRoPE is supported ('mrope_interleaved': true)")
    if len(section) != 3 or not all(isinstance(n, int) and n >= 0 for n in section) or sum(section) != head_dim // 2:
        raise ConfigError(
            f"{rope.where}: mrope_section must be three counts that add up to head_dim/2 = {head_dim // 2}, "
            f"found {section}"
        )
    return tuple(section)


def _parse_vision(fields: _Fields) -> VisionConfig:
    hidden, heads = fields.size("hidden_size"), fields.size("num_heads")
    if hidden % heads or (hidden // heads) % 4:
        raise ConfigError(f"{fields.where}: hidden_size {hidden} over {heads} heads must give a multiple of 4")
    table = fields.size("num_position_embeddings")
    side = int(table**0.5)
    if side**2 != table:
        raise ConfigError(f"{fields.where}: num_position_embeddings must be a square number, found {table}")
    depth = fields.size("depth")
    deepstack = tuple(fields.get("deepstack_visual_indexes", list))
    if not all(isinstance(block, int) and 0 <= block < depth for block in deepstack):
        raise ConfigError(f"{fields.where}: deepstack_visual_indexes {list(deepstack)} must lie in 0..{depth - 1}")
    activation = fields.get("hidden_act", str)
    if activation not in ("gelu_pytorch_tanh", "gelu"):
        raise ConfigError(f"{fields.where}: hidden_act '{activation}' is not gelu_pytorch_tanh or gelu")
    return VisionConfig(
        depth=depth,
        hidden=hidden,
        intermediate=fields.size("intermediate_size"),
        heads=heads,
        channels=fields.size("in_channels"),
        patch=fields.size("patch_size"),
        temporal_patch=fields.size("temporal_patch_size"),
        merge=fields.size("spatial_merge_size"),
        out_hidden=fields.size("out_hidden_size"),
        positions=side,
        deepstack=deepstack,
        activation=activation,
    )
