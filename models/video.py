"""Videos as lists of frames: one size for all, grouped by temporal patch, each group with its time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from models.errors import MediaError
from models.images import ImageProcessor, VisionInput, smart_resize, upright_rgb

MAX_FRAMES = 768  # Qwen3-VL's video_preprocessor_config.json


def process_video(
    frames: Sequence[Image.Image], fps: float, processor: ImageProcessor
) -> tuple[VisionInput, list[float]]:
    """The frames' patches, and the time in seconds of each temporal group: the middle of its first and last frame.

    An odd number of frames is filled up with the last one. Each group is kept within the processor's picture budget.

    Raises:
        MediaError: no frames, too many, of different sizes, or an fps that is not positive.
    """
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise MediaError(f"a video needs 1 to {MAX_FRAMES} frames, found {len(frames)}")
    if not (math.isfinite(fps) and fps > 0):
        raise MediaError(f"a video's fps must be positive, found {fps}")
    pictures = [upright_rgb(frame) for frame in frames]
    sizes = {picture.size for picture in pictures}
    if len(sizes) > 1:
        listed = ", ".join(f"{width} x {height}" for width, height in sorted(sizes))
        raise MediaError(f"the frames of a video must have one size, found {listed}")
    group = processor.temporal_patch_size
    indices = [*range(len(frames)), *[len(frames) - 1] * (-len(frames) % group)]
    rows, columns = frame_size(len(frames), pictures[0].height, pictures[0].width, processor)
    resized = np.stack([processor.resized(picture, rows, columns) for picture in pictures])[indices]
    times = [index / fps for index in indices]
    middles = [(times[start] + times[start + group - 1]) / 2 for start in range(0, len(times), group)]
    return processor.cut(resized, "video"), middles


def frame_size(count: int, height: int, width: int, processor: ImageProcessor) -> tuple[int, int]:
    """The size of each of `count` frames, in multiples of a merged patch: the volume (rows x columns x frames) lies
    within the processor's limits, and the area of one frame within its limit for pictures.

    The volume rule is transformers' `smart_resize` for Qwen3-VL videos, which counts frames once as they are and once
    rounded to whole groups, half to even; a single frame, which it refuses, counts as the group that it fills.
    """
    factor, group = processor.patch_size * processor.merge_size, processor.temporal_patch_size
    count = max(count, group)
    scale = max(1, factor / height, factor / width)
    height, width = int(height * scale), int(width * scale)
    rows, columns = smart_resize(
        height, width, factor, processor.min_volume, processor.max_volume, count, round(count / group) * group
    )
    if rows * columns > processor.max_pixels:
        rows, columns = smart_resize(height, width, factor, 0, processor.max_pixels)
    return rows, columns
