"""A conversation as prompt text, through the checkpoint's own Jinja template.

What users write stays ordinary text: control tokens in the result are the template's alone. Texts that spell one are
marked before rendering with a random string that no text contains, so that they are told apart afterwards.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.errors import CheckpointError, PromptError
from models.tokenizer import AddedToken

DEFAULT_TEMPLATE = Path(__file__).with_name("qwen3_vl_chat_template.jinja")


@dataclass(frozen=True)
class Segment:
    """A stretch of the prompt: one added token that the template wrote, or ordinary text."""

    text: str
    is_token: bool


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, name: str) -> None:
        """`name` is the template's place, for errors; CheckpointError if it is no valid template."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        # Jinja's own filter escapes for HTML, which a prompt is not.
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime.now().strftime}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{name}: not a valid chat template: {error}") from None

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """Reads `chat_template.jinja`, `chat_template.json` or the template in `tokenizer_config.json`, in this order.

        Raises:
            CheckpointError: none of them holds a valid template.
        """
        plain = folder / "chat_template.jinja"
        if plain.is_file():
            return cls(plain.read_text(encoding="utf-8"), str(plain))
        for file in (folder / "chat_template.json", folder / "tokenizer_config.json"):
            source = _template_in(file)
            if source is not None:
                return cls(source, str(file))
        raise CheckpointError(
            f"{folder}: no chat template in chat_template.jinja, chat_template.json or tokenizer_config.json"
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        added: Iterable[AddedToken],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **settings: Any,
    ) -> list[Segment]:
        """The conversation in segments; `added` are the vocabulary's tokens, `settings` go to the template.

        The assistant's earlier turns may hold `<think>` and `<tool_call>` marks, which templates look for; control
        tokens stay text there too.

        Raises:
            PromptError: the template refuses the conversation; the message is the template's.
        """
        added = list(added)
        mark = f"\ue000{secrets.token_hex(8)}\ue001"
        every = _pattern(token.text for token in added)
        control = _pattern(token.text for token in added if token.control)
        messages = [
            _marked(message, mark, control if message.get("role") == "assistant" else every) for message in messages
        ]
        try:
            text = self._template.render(
                messages=messages,
                tools=_marked(tools, mark, every),
                add_generation_prompt=add_generation_prompt,
                **settings,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise PromptError(f"the chat template cannot render this conversation: {error}") from None
        return _segments(text, mark, every)


def default_chat_template() -> ChatTemplate:
    """The format of Qwen3-VL, for models that come without a template."""
    return ChatTemplate(DEFAULT_TEMPLATE.read_text(encoding="utf-8"), str(DEFAULT_TEMPLATE))


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _template_in(file: Path) -> str | None:
    """The template in a JSON file: a string, or the one named "default" of a list."""
    if not file.is_file():
        return None
    try:
        template = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file}: cannot be read as a JSON object: {error}") from None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the tokens, the longest first; nothing if there are none."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or "(?!)")


def _marked(value: Any, mark: str, pattern: re.Pattern[str]) -> Any:
    """The value with every text that spells a token broken by the mark, at any depth."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
    if isinstance(value, Mapping):
        return {_marked(key, mark, pattern): _marked(entry, mark, pattern) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(entry, mark, pattern) for entry in value]
    return value


def _segments(text: str, mark: str, pattern: re.Pattern[str]) -> list[Segment]:
    segments, end = [], 0
    for match in pattern.finditer(text):
        segments += [Segment(text[end : match.start()], False), Segment(match[0], True)]
        end = match.end()
    segments.append(Segment(text[end:], False))
    return [Segment(segment.text.replace(mark, ""), segment.is_token) for segment in segments if segment.text]
