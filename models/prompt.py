"""A conversation with pictures as token ids: template, media, and a placeholder per visual token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
from PIL import Image

from models.chat_template import ChatTemplate, Segment
from models.config import ModelConfig
from models.errors import ContextLengthError, PromptError
from models.images import ImageProcessor, VisionInput
from models.tokenizer import Tokenizer
from models.video import process_video

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"


@dataclass(frozen=True)
class Prompt:
    """Token ids int32 `[length]` with one placeholder per visual token, and the pictures in order of appearance."""

    token_ids: np.ndarray
    visuals: tuple[VisionInput, ...]


@dataclass
class _Media:
    """The pictures and videos of a conversation, with the times of each video's frame groups, and their tokens."""

    visuals: list[VisionInput] = field(default_factory=list)
    times: list[list[float]] = field(default_factory=list)
    tokens: int = 0


class PromptBuilder:
    """Builds prompts for one model. `processor` is None for a text model; `context` is the most tokens of a prompt."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        processor: ImageProcessor | None,
        config: ModelConfig,
        context: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self.processor = processor
        self.config = config
        self.context = context

    def build(self, messages: list[dict[str, Any]], /, **settings: Any) -> Prompt:
        """`messages` are dicts of "role" and "content": a text, or parts {"type": "text", "text"}, {"type": "image",
        "image": PIL image}, {"type": "video", "frames": PIL images, "fps"}. A picture or video may have "load" instead,
        a function that returns the rest of the part: it is called when the ones before have been cut into patches, so
        that only one is in memory. `settings` go to the chat template.

        Raises:
            PromptError: the conversation has another form, the template refuses it, or it is far too long.
            MediaError: a picture or video cannot be used.
        """
        if not messages:
            raise PromptError("messages must not be empty")
        media = _Media()
        plain = [self._without_media(message, media) for message in messages]
        segments = self.template.render(plain, self.tokenizer.added, **settings)
        self.tokenizer.check_length("".join(segment.text for segment in segments if not segment.is_token), self.context)
        ids = [token for segment in _joined(self._expanded(segments, media)) for token in self._encode(segment)]
        return Prompt(np.array(ids, np.int32), tuple(media.visuals))

    def _without_media(self, message: Any, media: _Media) -> dict[str, Any]:
        """The message as templates know it, its pictures moved to `media`. Text alone becomes one string, because the
        templates of text models know no parts."""
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError("every message must be an object with a 'role'")
        content = message.get("content")
        if content is None:
            return message | {"content": ""}
        if isinstance(content, str):
            return message
        if not isinstance(content, list):
            raise PromptError(f"'content' must be a text or a list of parts, found {type(content).__name__}")
        parts = [self._part(part, media) for part in content]
        if all(part["type"] == "text" for part in parts):
            return message | {"content": "".join(part["text"] for part in parts)}
        return message | {"content": parts}

    def _part(self, part: Any, media: _Media) -> dict[str, Any]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            return {"type": "text", "text": part["text"]}
        if kind not in ("image", "video"):
            raise PromptError(f"a content part must be of type text, image or video, found {kind!r}")
        if self.processor is None:
            raise PromptError(f"this model takes text only, but the conversation has a part of type {kind}")
        if "load" in part:
            part = part | part["load"]()
        visual, times = self._image(part) if kind == "image" else self._video(part)
        media.visuals.append(visual)
        media.times.append(times)
        media.tokens += visual.tokens(self.config.vision.merge)
        if media.tokens > self.context:
            raise ContextLengthError(
                f"the pictures and videos have at least {media.tokens} tokens, but the context is limited to "
                f"{self.context}"
            )
        _ = visual.content_hash  # takes a while, and who needs it next is the thread that drives the model
        return {"type": kind}

    def _image(self, part: dict[str, Any]) -> tuple[VisionInput, list[float]]:
        image = part.get("image")
        if not isinstance(image, Image.Image):
            raise PromptError(f"an image part needs 'image', a PIL image, found {type(image).__name__}")
        return self.processor(image), []

    def _video(self, part: dict[str, Any]) -> tuple[VisionInput, list[float]]:
        frames, fps = part.get("frames"), part.get("fps")
        if not isinstance(frames, list | tuple) or not all(isinstance(frame, Image.Image) for frame in frames):
            raise PromptError("a video part needs 'frames', a list of PIL images")
        if isinstance(fps, bool) or not isinstance(fps, int | float):
            raise PromptError(f"a video part needs 'fps', a number, found {type(fps).__name__}")
        return process_video(frames, fps, self.processor)

    def _expanded(self, segments: list[Segment], media: _Media) -> Iterator[Segment]:
        """The segments with each placeholder repeated per visual token, and each video spread over its frame groups:
        `<0.2 seconds>`, start, pads, end, in the place of the template's start, pad, end."""
        waiting = iter(zip(media.visuals, media.times, strict=True))
        tokens = [segment.text if segment.is_token else None for segment in segments]
        for index, segment in enumerate(segments):
            before = tokens[index - 1] if index else None
            after = tokens[index + 1] if index + 1 < len(tokens) else None
            if (tokens[index], after) == (VISION_START, VIDEO_PAD) or (before, tokens[index]) == (
                VIDEO_PAD,
                VISION_END,
            ):
                continue  # every frame group brings its own
            if tokens[index] not in (IMAGE_PAD, VIDEO_PAD):
                yield segment
                continue
            visual, times = next(waiting, (None, None))
            if visual is None or (visual.kind == "video") != (tokens[index] == VIDEO_PAD):
                raise PromptError("the chat template does not place every picture where the conversation has it")
            yield from self._placeholders(segment, visual, times)
        if next(waiting, None) is not None:
            raise PromptError("the chat template leaves out a picture; put pictures into user messages")

    def _placeholders(self, pad: Segment, visual: VisionInput, times: list[float]) -> Iterator[Segment]:
        tokens = visual.tokens(self.config.vision.merge)
        if visual.kind == "image":
            yield from [pad] * tokens
        for seconds in times:
            yield Segment(f"<{seconds:.1f} seconds>", False)
            yield Segment(VISION_START, True)
            yield from [pad] * (tokens // len(times))
            yield Segment(VISION_END, True)

    def _encode(self, segment: Segment) -> list[int]:
        if segment.is_token:
            return [self.tokenizer.id_of(segment.text)]
        return self.tokenizer.encode_text(segment.text)


def _joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """The segments with neighbouring texts made one, because byte-pair encoding depends on what stands beside."""
    for is_token, group in groupby(segments, key=lambda segment: segment.is_token):
        if is_token:
            yield from group
        else:
            yield Segment("".join(segment.text for segment in group), False)
