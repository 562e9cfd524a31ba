"""The parity-critical details of the networks, each with a switch: negative controls in tests, arms of ablations."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from models.errors import ConfigError

MRopeLayout = Literal["interleaved", "sectioned", "1d"]


@dataclass(frozen=True)
class Switches:
    """The defaults are the model as published; every other value is a known way to get it wrong.

    deepstack: add the tapped vision features after the first decoder layers.
    deepstack_offset: blocks by which every tap is moved (reading `deepstack_visual_indexes` as 1-based is -1).
    mrope: how image positions turn the rotary frequencies: interleaved T, H, W; in three contiguous sections; or the
        plain token count on every axis ("1d").
    exact_merger_gelu: erf GELU in the mergers; False is the tanh approximation.
    frame_mask: the frames of a video do not attend to each other in the vision tower.
    swap_rows_and_columns: exchanges the H and W position of visual tokens in the decoder.
    rope_theta: replaces the configured base.
    qk_norm: RMSNorm of each query and key head before rotation.

    Raises:
        ConfigError: a value that is none of a switch's; without this an ablation would silently measure nothing.
    """

    deepstack: bool = True
    deepstack_offset: int = 0
    mrope: MRopeLayout = "interleaved"
    exact_merger_gelu: bool = True
    frame_mask: bool = True
    swap_rows_and_columns: bool = False
    rope_theta: float | None = None
    qk_norm: bool = True

    def __post_init__(self) -> None:
        if self.mrope not in get_args(MRopeLayout):
            raise ConfigError(f"mrope must be one of {', '.join(get_args(MRopeLayout))}, found {self.mrope!r}")
        for switch in fields(self):
            value = getattr(self, switch.name)
            if isinstance(switch.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{switch.name} must be True or False, found {value!r}")
