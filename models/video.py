"""Videos as lists of frames: one size for all, grouped by temporal patch, each group with its time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from models.errors import MediaError
from models.images import MAX_ASPECT, ImageProcessor, VisionInput

MAX_FRAMES = 768  # Qwen3-VL's video_preprocessor_config.json
MIN_VOLUME = 4096  # pixels x frames
MAX_VOLUME = 25165824


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
    sizes = {frame.size for frame in frames}
    if len(sizes) > 1:
        listed = ", ".join(f"{width} x {height}" for width, height in sorted(sizes))
        raise MediaError(f"the frames of a video must have one size, found {listed}")
    group = processor.temporal_patch_size
    indices = [*range(len(frames)), *[len(frames) - 1] * (-len(frames) % group)]
    rows, columns = _frame_size(frames[0], len(indices), processor)
    resized = np.stack([processor.resized(frame, rows, columns) for frame in frames])[indices]
    times = [index / fps for index in indices]
    middles = [(times[start] + times[start + group - 1]) / 2 for start in range(0, len(times), group)]
    return processor.cut(resized, "video"), middles


def _frame_size(frame: Image.Image, count: int, processor: ImageProcessor) -> tuple[int, int]:
    """The closest size in multiples of a merged patch whose volume (rows x columns x frames) lies within the limits, as
    in the Qwen3-VL video processor."""
    factor = processor.patch_size * processor.merge_size
    height, width = frame.height, frame.width
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise MediaError(f"the frames are {frame.width} x {frame.height}; a side may be {MAX_ASPECT} times the other")
    largest = min(MAX_VOLUME, processor.max_pixels * count)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if count * rows * columns > largest:
        shrink = math.sqrt(count * height * width / largest)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif count * rows * columns < MIN_VOLUME:
        grow = math.sqrt(MIN_VOLUME / (count * height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns
