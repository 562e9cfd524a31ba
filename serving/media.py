"""Messages with data URLs as messages with pictures and videos. Runs off the event loop: decoding takes time."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image

from models.images import MAX_PIXELS, open_image, picture_size
from models.video import read_animation
from serving.chat_request import ChatRequest, Message
from serving.content_parts import MOST_FRAMES
from serving.errors import bad_request

MOST_MEDIA = 16
USUAL_FPS = 2.0  # the rate at which Qwen3-VL's own processor takes frames out of a video
OTHER_VIDEOS = "other videos are not decoded here: send their frames, {'type': 'video_frames', 'video_frames': [...]}"


def conversation(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages that the model is to see as `LoadedModel.prompt` takes them, pictures and videos decoded.

    Raises:
        ApiError: 400 for a picture or video that cannot be used, naming its place.
    """
    messages = request.kept_messages[:-1] if request.begun_answer else request.kept_messages
    parts = [part for _, message in messages if isinstance(message.content, list) for part in message.content]
    media = sum(part["type"] != "text" for part in parts)
    if media > MOST_MEDIA:
        raise bad_request(f"a request may have {MOST_MEDIA} pictures and videos, found {media}", "messages")
    return [_converted(message, f"messages.{index}.content") for index, message in messages]


def _converted(message: Message, param: str) -> dict[str, Any]:
    values = message.model_dump(exclude_unset=True)  # templates ask what is defined
    if message.role == "developer":  # OpenAI's newer name, which templates do not know
        values["role"] = "system"
    if isinstance(message.content, list):
        values["content"] = [_part(part, f"{param}.{index}") for index, part in enumerate(message.content)]
    return values


def _part(part: dict[str, Any], param: str) -> dict[str, Any]:
    kind = part["type"]
    if kind == "text":
        return {"type": "text", "text": part["text"]}
    if kind == "image_url":
        return {"type": "image", "image": _picture(part["image_url"]["url"], f"{param}.image_url.url")}
    if kind == "video_url":
        frames, fps = _animation(part["video_url"]["url"], f"{param}.video_url.url")
    else:
        frames, fps = _frames(part["video_frames"], f"{param}.video_frames"), part.get("fps") or USUAL_FPS
    return {"type": "video", "frames": frames, "fps": fps}


def _picture(url: str, place: str) -> Image.Image:
    with _naming(place):
        return open_image(data_of_url(url))


def _animation(url: str, place: str) -> tuple[list[Image.Image], float]:
    with _naming(place, f"; {OTHER_VIDEOS}"):
        return read_animation(data_of_url(url), MOST_FRAMES)


def _frames(urls: list[str], param: str) -> list[Image.Image]:
    """The frames of a video, of which none is decoded before all have been found to be within the limits."""
    files, pixels = [], 0
    for index, url in enumerate(urls):
        with _naming(f"{param}.{index}"):
            files.append(data_of_url(url))
            width, height = picture_size(files[-1])
            pixels += width * height
            if pixels > MAX_PIXELS:
                raise ValueError(
                    f"with this frame, of {width} x {height}, the video has {pixels} pixels; all frames together may "
                    f"have {MAX_PIXELS}"
                )
    frames: list[Image.Image] = []
    for index, file in enumerate(files):
        with _naming(f"{param}.{index}"):
            frames.append(open_image(file))
            sizes = [f"{frame.width} x {frame.height}" for frame in (frames[0], frames[-1])]
            if sizes[0] != sizes[1]:
                raise ValueError(f"this frame is {sizes[1]} and the first one {sizes[0]}; they should have one size")
    return frames


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
