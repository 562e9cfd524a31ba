"""The mixture-of-experts block: a float32 router picks `top_k` experts per token and mixes their outputs."""

from __future__ import annotations

from flax import nnx
from jaxtyping import Array, Float, Int

from models.config import MoeConfig
from models.kernels import ops, reference
from models.layers import DECODE_ROWS, Linear, RMSNorm, quantised_room, stored_weight, unfilled
from models.quantisation import Format


class Experts(nnx.Module):
    """The weights of all experts, stacked: gate and up `[experts, 2 * intermediate, hidden]` (gate first), down
    `[experts, hidden, intermediate]`; quantised, their blocks and scales (`models.quantisation`)."""

    def __init__(self, config: MoeConfig, hidden: int) -> None:
        self.gate_up_proj = unfilled((config.experts, 2 * config.intermediate, hidden))
        self.down_proj = unfilled((config.experts, hidden, config.intermediate))
        self.gate_up_proj_scale: nnx.Param | None = nnx.data(None)
        self.down_proj_scale: nnx.Param | None = nnx.data(None)
        self.intermediate = config.intermediate

    def store_as(self, format: Format) -> None:
        """Makes room for the matrices in a quantised format instead of floats."""
        for name in ("gate_up_proj", "down_proj"):
            blocks, scales = quantised_room(getattr(self, name).get_value().shape, format)
            setattr(self, name, blocks)
            setattr(self, f"{name}_scale", scales)

    @property
    def row_by_row(self) -> bool:
        """Whether a token's result is the same, to the last bit, with any number of tokens."""
        return self.gate_up_proj_scale is not None

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        norm: RMSNorm,
        experts: Int[Array, "tokens top_k"],
        shares: Float[Array, "tokens top_k"],
    ) -> Float[Array, "tokens hidden"]:
        """Each token's experts on the normed token, mixed by their shares."""
        # For many tokens and float weights XLA's matrix products with every expert are faster than the kernel.
        many_floats = x.shape[0] > DECODE_ROWS and not self.row_by_row
        mix = reference.experts if many_floats else ops.experts
        gate_up = stored_weight(self.gate_up_proj, self.gate_up_proj_scale)
        down = stored_weight(self.down_proj, self.down_proj_scale)
        return mix(x, norm.parameters(), experts, shares, gate_up, down, self.intermediate)


class Router(Linear):
    """The linear layer that tells which experts suit a token. It is never quantised, and always the kernels': which
    experts a token gets must not depend on how many tokens are computed at once."""

    row_by_row = True

    def __call__(self, x: Float[Array, "tokens hidden"], norm: RMSNorm) -> Float[Array, "tokens experts"]:
        """Float32 logits."""
        return ops.matmul(x, norm.parameters(), [self.stored()], [self.size[0]])[0]


class MoeBlock(nnx.Module):
    """Router and experts in the place of a layer's MLP. Ties go to the expert with the lower index."""

    def __init__(self, config: MoeConfig, hidden: int) -> None:
        self.gate = Router(hidden, config.experts)
        self.experts = Experts(config, hidden)
        self.config = config

    def __call__(self, x: Float[Array, "batch length hidden"], norm: RMSNorm) -> Float[Array, "batch length hidden"]:
        tokens = x.reshape(-1, x.shape[-1])
        shares, experts = self.route(tokens, norm)
        return self.experts(tokens, norm, experts, shares).reshape(x.shape)

    def route(
        self, tokens: Float[Array, "tokens hidden"], norm: RMSNorm
    ) -> tuple[Float[Array, "tokens top_k"], Int[Array, "tokens top_k"]]:
        """Each token's shares and experts, best first. Softmax runs over all experts before the choice; the chosen
        shares are renormalised only if the configuration says so."""
        return ops.choose_experts(self.gate(tokens, norm), self.config.top_k, self.config.normalise)
