"""Messages with data URLs as messages with pictures. Runs off the event loop: decoding takes time."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from models import MediaError
from models.images import open_image
from serving.chat_request import ChatRequest, Message
from serving.errors import bad_request

MAX_PICTURES = 16


def conversation(request: ChatRequest) -> list[dict[str, Any]]:
    """The request's messages as `LoadedModel.prompt` takes them, pictures decoded.

    Raises:
        ApiError: 400 for a picture that cannot be used, naming its place.
    """
    parts = [part for message in request.messages if isinstance(message.content, list) for part in message.content]
    pictures = sum(part["type"] == "image_url" for part in parts)
    if pictures > MAX_PICTURES:
        raise bad_request(f"a request may have {MAX_PICTURES} pictures, found {pictures}", "messages")
    return [_converted(message, f"messages.{index}.content") for index, message in enumerate(request.messages)]


def _converted(message: Message, param: str) -> dict[str, Any]:
    values = message.model_dump(exclude_unset=True)  # templates ask what is defined
    if message.role == "developer":  # OpenAI's newer name, which templates do not know
        values["role"] = "system"
    if isinstance(message.content, list):
        values["content"] = [_part(part, f"{param}.{index}") for index, part in enumerate(message.content)]
    return values


def _part(part: dict[str, Any], param: str) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    place = f"{param}.image_url.url"
    try:
        return {"type": "image", "image": open_image(data_of_url(part["image_url"]["url"]))}
    except (MediaError, ValueError) as error:
        raise bad_request(f"'{place}': {error}", place) from None


def data_of_url(url: str) -> bytes:
    """The bytes of a base64 data URL. Nothing is ever fetched.

    Raises:
        ValueError: another kind of URL, or damaged base64.
    """
    head, comma, data = url.partition(",")
    if not head.startswith("data:"):
        raise ValueError("pictures must come as data URLs (data:image/png;base64,...); other addresses are not fetched")
    if not comma or not head.endswith(";base64"):
        raise ValueError("the data URL should have the form data:image/png;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data URL's base64 is damaged: {error}") from None
