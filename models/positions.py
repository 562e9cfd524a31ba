"""Position ids of a prompt: text counts on, a picture spans a plane, and decoding continues after its longest side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from models.config import ModelConfig
from models.errors import PromptError
from models.switches import Switches

Grid = tuple[int, int, int]


def rope_positions(
    token_ids: np.ndarray, grids: Iterable[Grid], config: ModelConfig, switches: Switches
) -> tuple[np.ndarray, int]:
    """Positions int32 `[3, length]` (T, H, W) of `token_ids` `[length]`, and the rope delta.

    `grids` lists the `(t, h, w)` patch grids of the pictures and videos in order of appearance. A video of `t` frame
    groups is `t` separate planes (time is told by text between them). Token `n` of the answer stands at position
    `n + delta` on all three axes, where `n` counts every token before it (transformers, `get_rope_index`).

    Raises:
        PromptError: the placeholder tokens do not match the grids.
    """
    if config.vision is None or switches.mrope == "1d":
        return np.broadcast_to(np.arange(len(token_ids), dtype=np.int32), (3, len(token_ids))).copy(), 0
    visual = np.isin(token_ids, (config.image_token, config.video_token))
    planes = _planes(grids, config.vision.merge, switches)
    positions = np.empty((3, len(token_ids)), np.int32)
    index = position = 0
    while index < len(token_ids):
        if visual[index]:
            plane = next(planes, None)
            length = 0 if plane is None else plane.shape[1]
            if not length or not visual[index : index + length].all() or index + length > len(token_ids):
                raise PromptError("the prompt has more placeholder tokens than its pictures have visual tokens")
            positions[:, index : index + length] = position + plane
            position += int(plane.max()) + 1
        else:
            length = _run_length(visual, index)
            positions[:, index : index + length] = np.arange(position, position + length, dtype=np.int32)
            position += length
        index += length
    if next(planes, None) is not None:
        raise PromptError("the prompt has fewer placeholder tokens than its pictures have visual tokens")
    return positions, position - len(token_ids)


def _planes(grids: Iterable[Grid], merge: int, switches: Switches) -> Iterator[np.ndarray]:
    """Offsets `[3, h/merge * w/merge]` of each frame group, row by row."""
    for frames, height, width in grids:
        rows, columns = np.divmod(np.arange(height // merge * (width // merge), dtype=np.int32), width // merge)
        plane = np.stack([np.zeros_like(rows), rows, columns])
        if switches.swap_rows_and_columns:
            plane = plane[[0, 2, 1]]
        for _ in range(frames):
            yield plane


def _run_length(visual: np.ndarray, start: int) -> int:
    """Length of the run of text tokens that starts at `start`."""
    following = np.flatnonzero(visual[start:])
    return int(following[0]) if len(following) else len(visual) - start
