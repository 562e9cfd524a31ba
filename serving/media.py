"""Messages with data URLs as messages with pictures and videos. Runs off the event loop: decoding takes time."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from PIL import Image

from models.images import FORMATS, MAX_PIXELS, open_image, picture_size
from models.video import ANIMATED, read_animation
from serving.chat_request import ChatRequest, Message
from serving.content_parts import MOST_FRAMES
from serving.errors import bad_request

MOST_MEDIA = 16
MOST_PIXELS = 4 * MAX_PIXELS  # of all pictures and videos: 16 photos of 12 megapixels, a few seconds of work
USUAL_FPS = 2.0  # the rate at which Qwen3-VL's own processor takes frames out of a video
OTHER_VIDEOS = "; other videos are not decoded here: send their frames, {'type': 'video_frames', 'video_frames': [...]}"


def conversation(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages that the model is to see as `LoadedModel.prompt` takes them. Of pictures and videos only the headers
    have been read; each is decoded when its turn comes there, which raises what is found to be wrong with it.

    Raises:
        ApiError: 400 for a picture or video that cannot be used, naming its place.
    """
    messages = request.kept_messages
    parts = [part for _, message in messages if isinstance(message.content, list) for part in message.content]
    media = sum(part["type"] != "text" for part in parts)
    if media > MOST_MEDIA:
        raise bad_request(f"a request may have {MOST_MEDIA} pictures and videos, found {media}", "messages")
    budget = _PixelBudget()
    return [_converted(message, f"messages.{index}.content", budget) for index, message in messages]


class _PixelBudget:
    """Counts the pixels of a request, as the headers of its pictures and videos have them."""

    def __init__(self) -> None:
        self._taken = 0

    def open(self, url: str, formats: Sequence[str] = FORMATS, *, frames: int = 1) -> tuple[bytes, int]:
        """The file in a data URL, and the pixels that count for it: those of so many frames, as far as one file may
        have them.

        Raises:
            ValueError: it cannot be used, or it is one too many.
        """
        file = data_of_url(url)
        width, height = picture_size(file, formats=formats)
        pixels = min(frames * width * height, MAX_PIXELS)
        self._taken += pixels
        if self._taken > MOST_PIXELS:
            raise ValueError(
                f"with this one, of {width} x {height}, the pictures and videos of the request have {self._taken} "
                f"pixels; together they may have {MOST_PIXELS}"
            )
        return file, pixels


def _converted(message: Message, param: str, budget: _PixelBudget) -> dict[str, Any]:
    values = message.model_dump(exclude_unset=True)  # templates ask what is defined
    if message.role == "developer":  # OpenAI's newer name, which templates do not know
        values["role"] = "system"
    if isinstance(message.content, list):
        values["content"] = [_part(part, f"{param}.{index}", budget) for index, part in enumerate(message.content)]
    return values


def _part(part: dict[str, Any], param: str, budget: _PixelBudget) -> dict[str, Any]:
    kind = part["type"]
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        return {"type": "image", "load": _picture(part["image_url"]["url"], f"{param}.image_url.url", budget)}
    if kind == "video_url":
        return {"type": "video", "load": _animation(part["video_url"]["url"], f"{param}.video_url.url", budget)}
    load = _frames(part["video_frames"], f"{param}.video_frames", budget)
    return {"type": "video", "load": load, "fps": part.get("fps") or USUAL_FPS}


def _picture(url: str, place: str, budget: _PixelBudget) -> partial[dict[str, Any]]:
    with _naming(place):
        file, _ = budget.open(url)
    return partial(_decoded_picture, file, place)


def _decoded_picture(file: bytes, place: str) -> dict[str, Any]:
    with _naming(place):
        return {"image": open_image(file)}


def _animation(url: str, place: str, budget: _PixelBudget) -> partial[dict[str, Any]]:
    """Counts as many frames as there may be: how many there are, only decoding would tell."""
    with _naming(place, OTHER_VIDEOS):
        file, _ = budget.open(url, ANIMATED, frames=MOST_FRAMES)
    return partial(_decoded_animation, file, place)


def _decoded_animation(file: bytes, place: str) -> dict[str, Any]:
    with _naming(place, OTHER_VIDEOS):
        frames, fps = read_animation(file, MOST_FRAMES)
        return {"frames": frames, "fps": fps}


def _frames(urls: list[str], param: str, budget: _PixelBudget) -> partial[dict[str, Any]]:
    """The frames of a video, whose limit is that of one file."""
    files, pixels = [], 0
    for index, url in enumerate(urls):
        with _naming(f"{param}.{index}"):
            file, own = budget.open(url)
            files.append(file)
            pixels += own
            if pixels > MAX_PIXELS:
                raise ValueError(
                    f"with this frame the video has {pixels} pixels; all frames together may have {MAX_PIXELS}"
                )
    return partial(_decoded_frames, files, param)


def _decoded_frames(files: list[bytes], param: str) -> dict[str, Any]:
    frames: list[Image.Image] = []
    for index, file in enumerate(files):
        with _naming(f"{param}.{index}"):
            frames.append(open_image(file))
            sizes = [f"{frame.width} x {frame.height}" for frame in (frames[0], frames[-1])]
            if sizes[0] != sizes[1]:
                raise ValueError(f"this frame is {sizes[1]} and the first one {sizes[0]}; they should have one size")
    return {"frames": frames}


@contextmanager
def _naming(place: str, advice: str = "") -> Iterator[None]:
    """Turns what is wrong with a picture (MediaError) or its URL (ValueError) into a 400 that names its place."""
    try:
        yield
    except ValueError as error:
        raise bad_request(f"'{place}': {error}{advice}", place) from None


def data_of_url(url: str) -> bytes:
    """The bytes of a base64 data URL. Nothing is ever fetched.

    Raises:
        ValueError: another kind of URL, or damaged base64.
    """
    head, comma, data = url.partition(",")
    if not head.startswith("data:"):
        raise ValueError("media must come as data URLs (data:image/png;base64,...); other addresses are not fetched")
    if not comma or not head.endswith(";base64"):
        raise ValueError("the data URL should have the form data:image/png;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data URL's base64 is damaged: {error}") from None
