"""Pictures as the Qwen3-VL processor takes them: safe decoding, smart resize, and patches in merge-block order."""

from __future__ import annotations

import hashlib
import io
import json
import math
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from models.errors import CheckpointError, MediaError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 50_000_000  # of a file, read from its header before anything is decoded
MAX_ASPECT = 200
# The published preprocessor_config.json of Qwen3-VL; sizes are areas in pixels.
PUBLISHED = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decodes a file to RGB: the first frame, turned as EXIF says, transparency laid over white.

    Raises:
        MediaError: not a picture of a known format, cut off, or more than `max_pixels` (said before it is decoded).
    """
    if not data:
        raise MediaError("the picture is empty: 0 bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large or odd files; the checks here are stricter
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _check_size(image, max_pixels)
            image.load()
            return to_rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        raise MediaError(f"the picture is damaged or in none of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise MediaError(f"the picture is too large: at most {max_pixels} pixels are allowed") from None
    except MediaError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, struct.error) as error:
        raise MediaError(f"the picture is damaged: {error}") from None


def _check_size(image: Image.Image, max_pixels: int) -> None:
    width, height = image.size
    if width * height > max_pixels:
        raise MediaError(f"the picture has {width} x {height} pixels; at most {max_pixels} are allowed")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise MediaError(f"the picture is {width} x {height}; its longer side may be {MAX_ASPECT} times the shorter")


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB with 8 bits; what is transparent becomes white, 16-bit grey is scaled to 8."""
    if image.mode.startswith("I"):
        # Pillow's own conversion would cut everything above 255 off.
        grey = np.asarray(image, np.int64)
        return Image.fromarray((np.clip(grey, 0, 65535) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


@dataclass(frozen=True)
class VisionInput:
    """One picture or video as the vision tower takes it: `patches` float32 `[t * h * w, values]` in merge-block order
    for the grid (t, h, w), where `values` are channel, frame of the temporal patch, row, column (flattened)."""

    patches: np.ndarray
    grid: tuple[int, int, int]
    kind: Literal["image", "video"]

    @cached_property
    def content_hash(self) -> str:
        """Equal pictures, equal hash."""
        return hashlib.sha256(repr((self.kind, self.grid)).encode() + self.patches.tobytes()).hexdigest()

    def tokens(self, merge: int) -> int:
        """Tokens in the prompt, after `merge` x `merge` patches have become one."""
        frames, height, width = self.grid
        return frames * height * width // merge**2


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """The size whose sides are multiples of `factor`, whose area lies within the limits, and whose shape is closest.

    Sides round half to even, as in transformers' `smart_resize`.
    """
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise MediaError(f"the picture is {width} x {height}; its longer side may be {MAX_ASPECT} times the shorter")
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if rows * columns > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns


@dataclass(frozen=True)
class ImageProcessor:
    """Resize, scale and cut into patches, by the numbers of `preprocessor_config.json`; `min_pixels` and `max_pixels`
    are areas of the resized picture."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def from_folder(cls, folder: Path | None, max_image_tokens: int = 1280) -> ImageProcessor:
        """Reads the folder's file; Qwen3-VL's published numbers where there is none. Pictures are kept within
        `max_image_tokens`, if the file does not set a lower limit.

        Raises:
            CheckpointError: the file cannot be read or lacks a field.
        """
        file = None if folder is None else folder / "preprocessor_config.json"
        values = PUBLISHED if file is None or not file.is_file() else _read_settings(file)
        block = values["patch_size"] * values["merge_size"]
        max_pixels = min(values["size"]["longest_edge"], max_image_tokens * block**2)
        return cls(
            patch_size=values["patch_size"],
            temporal_patch_size=values["temporal_patch_size"],
            merge_size=values["merge_size"],
            min_pixels=min(values["size"]["shortest_edge"], max_pixels),
            max_pixels=max_pixels,
            mean=tuple(values["image_mean"]),
            std=tuple(values["image_std"]),
        )

    @property
    def max_tokens(self) -> int:
        """Visual tokens of the largest picture."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2

    def __call__(self, image: Image.Image) -> VisionInput:
        """One picture; it fills all frames of its single temporal patch."""
        rows, columns = smart_resize(
            image.height, image.width, self.patch_size * self.merge_size, self.min_pixels, self.max_pixels
        )
        resized = self.resized(image, rows, columns)
        frames = np.broadcast_to(resized, (self.temporal_patch_size, *resized.shape))
        return self.cut(frames, "image")

    @staticmethod
    def resized(image: Image.Image, rows: int, columns: int) -> np.ndarray:
        """The picture in RGB at this size, uint8 `[rows, columns, 3]`."""
        return np.asarray(to_rgb(image).resize((columns, rows), Image.Resampling.BICUBIC))

    def cut(self, frames: np.ndarray, kind: Literal["image", "video"]) -> VisionInput:
        """Patches of frames uint8 `[frames, rows, columns, channels]`, whose number divides into temporal patches."""
        p, m = self.patch_size, self.merge_size
        count, rows, columns, channels = frames.shape
        grid = (count // self.temporal_patch_size, rows // p, columns // p)
        split = frames.reshape(grid[0], -1, grid[1] // m, m, p, grid[2] // m, m, p, channels)
        ordered = split.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(math.prod(grid), channels, -1)
        levels = self._levels()
        patches = np.stack([levels[channel][ordered[:, channel]] for channel in range(channels)], axis=1)
        return VisionInput(patches.reshape(len(patches), -1), grid, kind)

    def _levels(self) -> np.ndarray:
        """What each of the 256 levels becomes, float32 `[channels, 256]`: scaled in float64, normalised in float32, as
        transformers does, so that the result is equal to the bit."""
        scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        return (scaled[None] - mean[:, None]) / std[:, None]


def _read_settings(file: Path) -> dict[str, Any]:
    try:
        values = PUBLISHED | json.loads(file.read_text(encoding="utf-8"))
        sizes = values["size"]
        numbers: Sequence[Any] = [values["patch_size"], values["temporal_patch_size"], values["merge_size"]]
        numbers = [*numbers, sizes["shortest_edge"], sizes["longest_edge"]]
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read as a JSON object: {error}") from None
    except KeyError as error:
        raise CheckpointError(f"{file}: 'size' needs shortest_edge and longest_edge; {error} is missing") from None
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise CheckpointError(f"{file}: sizes must be positive whole numbers, found {numbers}")
    return values
