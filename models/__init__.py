"""Qwen3-VL and Qwen3-MoE inference in JAX: from a checkpoint folder to logits and tokens.

import models
model = models.load("tiny-vl")
for step in model.generate("Count from 1 to 5"):
    print(step.text, step.margin)
"""

from models.batch import Batch, BatchLimits
from models.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthError,
    GrammarError,
    KestrelError,
    MediaError,
    PromptError,
)
from models.generation import Generation, PrefillProgress, Request, Step
from models.model import LoadedModel, check, load
from models.prompt import Prompt
from models.sampling import SamplingParams
from models.switches import Switches

__all__ = [
    "Batch",
    "BatchLimits",
    "CheckpointError",
    "ConfigError",
    "ContextLengthError",
    "Generation",
    "GrammarError",
    "KestrelError",
    "LoadedModel",
    "MediaError",
    "PrefillProgress",
    "Prompt",
    "PromptError",
    "Request",
    "SamplingParams",
    "Step",
    "Switches",
    "check",
    "load",
]
