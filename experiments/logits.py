"""Logits of one prompt computed in two ways, compared token by token."""

from __future__ import annotations

import jax
import numpy as np

from models import LoadedModel
from models.prompt import Prompt


def prompt_logits(model: LoadedModel, prompt: Prompt) -> np.ndarray:
    """Logits `[length, vocab]` after every token of a prompt, with its pictures."""
    return model.logits(prompt.token_ids, **picture_arguments(prompt))


def picture_arguments(prompt: Prompt) -> dict[str, np.ndarray]:
    """The pictures of a prompt as `LoadedModel.logits` takes them."""
    arguments = {}
    for kind, pixels, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        own = [visual for visual in prompt.visuals if visual.kind == kind]
        if own:
            arguments[pixels] = np.concatenate([visual.patches for visual in own])
            arguments[grids] = np.array([visual.grid for visual in own])
    return arguments


def divergences(wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Kullback-Leibler divergence in nats of every token's prediction `[length]` from the wanted one; logits are
    `[length, vocab]`."""
    log_wanted, log_found = (np.asarray(jax.nn.log_softmax(logits, axis=-1)) for logits in (wanted, found))
    return np.sum(np.exp(log_wanted) * (log_wanted - log_found), axis=-1)


def agreements(wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Whether the most likely successor of every token is the same, bool `[length]`."""
    return found.argmax(axis=-1) == wanted.argmax(axis=-1)
