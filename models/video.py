"""Videos as lists of frames: one size for all, grouped by temporal patch, each group with its time. Animated pictures
are read; video files are not, which needs a decoder."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image

from models.errors import MediaError
from models.images import (
    MAX_PIXELS,
    ImageProcessor,
    VisionInput,
    open_header,
    quiet_pillow,
    smart_resize,
    upright_rgb,
)

MAX_FRAMES = 768  # Qwen3-VL's video_preprocessor_config.json
ANIMATED = ("GIF", "WEBP", "PNG")
NO_DELAY, USUAL_DELAY = 10, 100  # milliseconds: up to the first, browsers take a frame's delay for the second


def read_animation(
    data: bytes, max_frames: int = MAX_FRAMES, max_pixels: int = MAX_PIXELS
) -> tuple[list[Image.Image], float]:
    """The frames of an animated GIF, WebP or PNG in RGB, and their number per second, on average over the file. A file
    with one picture has one frame.

    Raises:
        MediaError: another kind of file, a damaged one, more than `max_frames`, or more than `max_pixels` in all frames
            together; the pixels are said before the frame that exceeds them is decoded.
    """
    frames: list[Image.Image] = []
    milliseconds = 0.0
    with quiet_pillow():
        file = open_header(data, max_pixels, ANIMATED)
        # A PNG's picture for programs that show no animations; its texts may have any key, but are no booleans.
        first = int(file.info.get("default_image") is True)
        for index in itertools.count(first):
            if not _at_frame(file, index):
                break
            _check_limits(file, len(frames), max_frames, max_pixels)
            try:
                frame = upright_rgb(file)
                frames.append(frame.copy() if frame is file else frame)
            except MediaError as error:
                raise MediaError(f"frame {len(frames)}: {error}") from None
            delay = file.info.get("duration")
            milliseconds += delay if isinstance(delay, int | float) and delay > NO_DELAY else USUAL_DELAY
    if not frames:
        raise MediaError("the file is damaged: it has no frames")
    return frames, 1e3 * len(frames) / milliseconds


def _at_frame(file: Image.Image, index: int) -> bool:
    """Goes to a frame; False if there are no more."""
    try:
        file.seek(index)
    except EOFError:
        return False
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise MediaError(f"the file is damaged: {error}") from None
    return True


def _check_limits(file: Image.Image, index: int, max_frames: int, max_pixels: int) -> None:
    """Refuses the frame at which `file` is, the number `index` of those taken."""
    if index == max_frames:
        raise MediaError(f"the video has more than {max_frames} frames")
    if (index + 1) * file.width * file.height > max_pixels:
        raise MediaError(
            f"with frame {index}, of {file.width} x {file.height}, the video has more than the {max_pixels} pixels "
            "that all frames may have together"
        )


def process_video(
    frames: Sequence[Image.Image], fps: float, processor: ImageProcessor
) -> tuple[VisionInput, list[float]]:
    """The frames' patches, and the time in seconds of each temporal group: the middle of its first and last frame.

    An odd number of frames is filled up with the last one. All groups together are kept within the processor's budget
    for a picture.

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
    within the processor's limits, and the area of all temporal groups together within its limit for a picture, as far
    as one merged patch per group allows.

    The volume rule is transformers' `smart_resize` for Qwen3-VL videos, which counts frames once as they are and once
    rounded to whole groups, half to even; a single frame, which it refuses, counts as the group that it fills.
    """
    factor, group = processor.patch_size * processor.merge_size, processor.temporal_patch_size
    count = max(count, group)
    groups = -(-count // group)
    scale = max(1, factor / height, factor / width)
    height, width = int(height * scale), int(width * scale)
    rows, columns = smart_resize(
        height, width, factor, processor.min_volume, processor.max_volume, count, round(count / group) * group
    )
    if groups * rows * columns > processor.max_pixels:
        rows, columns = smart_resize(height, width, factor, 0, processor.max_pixels // groups)
    return rows, columns
