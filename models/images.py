"""Pictures as the Qwen3-VL processor takes them: safe decoding, smart resize, and patches in merge-block order."""

from __future__ import annotations

import hashlib
import io
import json
import math
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from models.errors import CheckpointError, ConfigError, MediaError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 50_000_000  # of a file, read from its header before anything is decoded
MAX_ASPECT = 200
_PILLOW_WARNINGS = threading.Lock()  # catch_warnings changes the state of the whole process
# The published preprocessor_config.json of Qwen3-VL; sizes are areas in pixels.
PUBLISHED = {
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PUBLISHED_VOLUME = {"shortest_edge": 4096, "longest_edge": 25165824}  # pixels x frames, video_preprocessor_config.json


def open_image(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Decodes a file to RGB: the first frame, turned as EXIF says, transparency laid over white.

    Raises:
        MediaError: not a picture of a known format, cut off, or more than `max_pixels` (said before it is decoded).
    """
    with quiet_pillow():
        return upright_rgb(open_header(data, max_pixels))


def picture_size(data: bytes, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = FORMATS) -> tuple[int, int]:
    """Width and height of a file, as its header has them: nothing is decoded.

    Raises:
        MediaError: as `open_image`, as far as the header tells.
    """
    with quiet_pillow():
        return open_header(data, max_pixels, formats).size


@contextmanager
def quiet_pillow() -> Iterator[None]:
    """Keeps back what Pillow warns of, large or odd files: the checks here are stricter."""
    with _PILLOW_WARNINGS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def open_header(data: bytes, max_pixels: int, formats: Sequence[str] = FORMATS) -> Image.Image:
    """The file as Pillow opens it: its size is known and allowed, nothing is decoded. Within `quiet_pillow`.

    Raises:
        MediaError: as `open_image`.
    """
    image = _opened(data, max_pixels, formats)
    if image.width * image.height > max_pixels:
        raise MediaError(f"the picture has {image.width} x {image.height} pixels; at most {max_pixels} are allowed")
    _check_aspect(image.height, image.width)
    return image


def _opened(data: bytes, max_pixels: int, formats: Sequence[str]) -> Image.Image:
    if not data:
        raise MediaError("the picture is empty: 0 bytes")
    try:
        return Image.open(io.BytesIO(data), formats=formats)
    except UnidentifiedImageError:
        raise MediaError(f"the picture is damaged or in none of the formats {', '.join(formats)}") from None
    except Image.DecompressionBombError:
        raise MediaError(f"the picture is too large: at most {max_pixels} pixels are allowed") from None
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise MediaError(f"the picture is damaged: {error}") from None


def _check_aspect(height: int, width: int) -> None:
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise MediaError(f"the picture is {width} x {height}; its longer side may be {MAX_ASPECT} times the shorter")


def upright_rgb(image: Image.Image) -> Image.Image:
    """The picture turned as its EXIF data says, in RGB with 8 bits, what is transparent laid over white. One that is so
    already is returned itself, because a copy of a large one takes as much memory again.

    Raises:
        MediaError: its file, which Pillow may read only now, is damaged.
    """
    try:
        image.load()
        upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
        return _to_rgb(image if upright else ImageOps.exif_transpose(image))
    except Exception as error:  # decoders raise whatever a damaged file leads them to
        raise MediaError(f"the picture is damaged: {error}") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        layer = image if image.mode == "RGBA" else image.convert("RGBA")
        page = Image.new("RGB", layer.size, "white")
        page.paste(layer, mask=layer)
        return page
    return image if image.mode == "RGB" else image.convert("RGB")


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
        found = hashlib.sha256(repr((self.kind, self.grid)).encode())
        found.update(np.ascontiguousarray(self.patches).data)
        return found.hexdigest()

    def tokens(self, merge: int) -> int:
        """Tokens in the prompt, after `merge` x `merge` patches have become one."""
        frames, height, width = self.grid
        return frames * height * width // merge**2


def smart_resize(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, frames: int = 1, counted: int = 1
) -> tuple[int, int]:
    """The size whose sides are multiples of `factor`, whose area lies within the limits, and whose shape is closest.

    Sides round half to even, as in transformers' `smart_resize`. Where that exceeds `max_pixels`, as it does for long
    narrow pictures and small limits, the limit holds here. The limits are for the area times `counted` frames, the
    scale to meet them for `frames`: transformers' rule for videos, in which the two may differ.
    """
    _check_aspect(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if counted * rows * columns < min_pixels:
        grow = math.sqrt(min_pixels / (frames * height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    if counted * rows * columns > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        longest = max(factor, max_pixels // (counted * factor**2) * factor)  # beside a shorter side of one factor
        rows = min(longest, max(factor, math.floor(height / shrink / factor) * factor))
        columns = min(longest, max(factor, math.floor(width / shrink / factor) * factor))
    return rows, columns


@dataclass(frozen=True)
class ImageProcessor:
    """Resize, scale and cut into patches, by the numbers of `preprocessor_config.json`; `min_pixels` and `max_pixels`
    are areas of the resized picture, `min_volume` and `max_volume` those of all frames of a video together."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    min_volume: int = PUBLISHED_VOLUME["shortest_edge"]
    max_volume: int = PUBLISHED_VOLUME["longest_edge"]

    @classmethod
    def from_folder(cls, folder: Path | None, max_image_tokens: int = 1280) -> ImageProcessor:
        """Reads the folder's files, and `video_preprocessor_config.json` for the sizes of videos; Qwen3-VL's published
        numbers where there are none. Pictures are kept within `max_image_tokens`, if the file sets no lower limit.

        Raises:
            CheckpointError: a file cannot be read or holds no usable number.
            ConfigError: `max_image_tokens` is not positive.
        """
        if max_image_tokens < 1:
            raise ConfigError(f"max_image_tokens must be at least 1, found {max_image_tokens}")
        values = _read_settings(folder, "preprocessor_config.json", PUBLISHED)
        volume = _read_settings(folder, "video_preprocessor_config.json", PUBLISHED | {"size": PUBLISHED_VOLUME})
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
            min_volume=volume["size"]["shortest_edge"],
            max_volume=volume["size"]["longest_edge"],
        )

    @property
    def max_tokens(self) -> int:
        """Visual tokens of the largest picture."""
        return self.max_pixels // (self.patch_size * self.merge_size) ** 2

    def __call__(self, image: Image.Image) -> VisionInput:
        """One picture; it fills all frames of its single temporal patch."""
        upright = upright_rgb(image)
        factor = self.patch_size * self.merge_size
        rows, columns = smart_resize(upright.height, upright.width, factor, self.min_pixels, self.max_pixels)
        resized = self.resized(upright, rows, columns)
        frames = np.broadcast_to(resized, (self.temporal_patch_size, *resized.shape))
        return self.cut(frames, "image")

    @staticmethod
    def resized(image: Image.Image, rows: int, columns: int) -> np.ndarray:
        """The RGB picture at this size, uint8 `[rows, columns, 3]`."""
        return np.asarray(image.resize((columns, rows), Image.Resampling.BICUBIC))

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


def _read_settings(folder: Path | None, name: str, published: dict[str, Any]) -> dict[str, Any]:
    """The published settings, overwritten by those in the folder's file if there is one."""
    file = None if folder is None else folder / name
    if file is None or not file.is_file():
        return published
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        if "size" not in read and "min_pixels" in read:  # the older spelling
            read["size"] = {"shortest_edge": read["min_pixels"], "longest_edge": read["max_pixels"]}
        values = published | read
        numbers = [values[key] for key in ("patch_size", "temporal_patch_size", "merge_size")]
        numbers += [values["size"][key] for key in ("shortest_edge", "longest_edge")]
    except KeyError as error:
        raise CheckpointError(f"{file}: 'size' needs shortest_edge and longest_edge; {error} is missing") from None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: cannot be read as a JSON object: {error}") from None
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise CheckpointError(f"{file}: sizes must be positive whole numbers, found {numbers}")
    return values
