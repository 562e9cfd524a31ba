"""Qwen3-VL and Qwen3-MoE inference in JAX: from a checkpoint folder to logits and tokens.

import models
model = models.load("tiny-vl")
for step in model.generate("Count from 1 to 5"):
    print(step.text, step.margin)
"""

from models.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    GrammarError,
    KestrelError,
    MediaError,
    PromptError,
)
from models.generation import PrefillProgress, Step
from models.model import LoadedModel, load
from models.prompt import Prompt
from models.sampling import SamplingParams
from models.switches import Switches

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "GrammarError",
    "KestrelError",
    "LoadedModel",
    "MediaError",
    "PrefillProgress",
    "Prompt",
    "PromptError",
    "SamplingParams",
    "Step",
    "Switches",
    "load",
]
