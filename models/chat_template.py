"""A conversation as prompt text, through the checkpoint's own Jinja template.

What users write stays ordinary text: control tokens in the result are the template's alone. Before rendering, every
character with which a token could begin is followed by a random string that no text contains. A user's text can thus
not spell a token, not even in two parts that the template joins, and the random strings are taken out afterwards.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
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

    def __init__(self, source: str, name: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`name` is the template's place, for errors; CheckpointError if it is no valid template. `special_tokens` are
        the tokens that it knows by a name of its own, such as `eos_token`."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        # Jinja's own filter escapes for HTML, which a prompt is not.
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            parsed = environment.parse(source)
            used = jinja2.meta.find_undeclared_variables(parsed)
            self._template = environment.from_string(parsed)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"{name}: not a valid chat template: {error}") from None
        self.takes_tools = "tools" in used  # whether it has a place for them
        self._name = name
        self._special_tokens = {token: text for token, text in (special_tokens or {}).items() if token in used}

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """Reads `chat_template.jinja`, `chat_template.json` or the template in `tokenizer_config.json`, in this order.

        Raises:
            CheckpointError: none of them holds a valid template.
        """
        plain = folder / "chat_template.jinja"
        special_tokens = _special_tokens_in(folder / "tokenizer_config.json")
        if plain.is_file():
            try:
                return cls(plain.read_text(encoding="utf-8"), str(plain), special_tokens)
            except (OSError, UnicodeDecodeError) as error:
                raise CheckpointError(f"{plain}: cannot be read: {error}") from None
        for file in (folder / "chat_template.json", folder / "tokenizer_config.json"):
            source = _template_in(file)
            if source is not None:
                return cls(source, str(file), special_tokens)
        raise CheckpointError(
            f"{folder}: no chat template in chat_template.jinja, chat_template.json or tokenizer_config.json"
        )

    def check_special_tokens(self, added: Sequence[AddedToken]) -> None:
        """Raises CheckpointError if the template names a token that the vocabulary does not have: it would be text."""
        known = {token.text for token in added}
        for name, text in self._special_tokens.items():
            if text not in known:
                raise CheckpointError(
                    f"{self._name}: the template uses {name}, which is {text!r}; the vocabulary has no such token"
                )

    def render(
        self,
        messages: list[dict[str, Any]],
        added: Sequence[AddedToken],
        /,
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **settings: Any,
    ) -> list[Segment]:
        """The conversation in segments; `added` are the vocabulary's tokens, `settings` go to the template.

        What the assistant wrote earlier may hold `<think>` and `<tool_call>`, which templates look for; control tokens
        stay text there too.

        Raises:
            PromptError: the template refuses the conversation; the message is the template's.
        """
        marker = _Marker(added)
        try:
            text = self._template.render(
                messages=[marker.message(message) for message in messages],
                tools=marker.value(tools),
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens | marker.value(settings),
            )
        except Exception as error:  # a template is a program: what it does with a strange conversation is open
            raise PromptError(f"the chat template cannot render this conversation: {error}") from None
        return _segments(text, marker.mark, _any_of(token.text for token in added))


def default_chat_template() -> ChatTemplate:
    """The format of Qwen3-VL, for models that come without a template."""
    return ChatTemplate(DEFAULT_TEMPLATE.read_text(encoding="utf-8"), str(DEFAULT_TEMPLATE))


def _now(format: str) -> str:
    """The time of the call, which may be days after the template was loaded."""
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The `tojson` of chat templates, with the arguments that transformers gives it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _settings_in(file: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is no file."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read as a JSON object: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{file}: cannot be read as a JSON object: found a {type(values).__name__}")
    return values


def _special_tokens_in(file: Path) -> dict[str, str]:
    """The tokens that have a name in `tokenizer_config.json`, as transformers passes them to templates: each a text or
    an object with its text as `content`."""
    values = _settings_in(file)
    others = values.get("extra_special_tokens")
    named = {name: token for name, token in values.items() if name.endswith("_token")}
    named |= others if isinstance(others, dict) else {}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template_in(file: Path) -> str | None:
    """The template in a JSON file: a string, or the one named "default" of a list."""
    template = _settings_in(file).get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _any_of(texts: Iterable[str]) -> str:
    """A regular expression for any of the texts, the longest first; it matches nothing if there are none."""
    return "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"


class _Marker:
    """Breaks what could be read as a token in other people's texts, with a random `mark`."""

    def __init__(self, added: Sequence[AddedToken]) -> None:
        self.mark = f"{secrets.randbits(96):030d}"  # digits, which JSON, trimming and upper case leave as they are
        self._start = re.compile(_any_of({token.text[0] for token in added}))
        spoken = _any_of(token.text for token in added if not token.control)
        self._start_of_control = re.compile(f"(?!{spoken})(?:{self._start.pattern})")

    def value(self, value: Any, start: re.Pattern[str] | None = None) -> Any:
        """The value with its texts marked where a token may start, at any depth, keys included."""
        start = start or self._start
        if isinstance(value, str):
            return start.sub(lambda match: match[0] + self.mark, value)
        if isinstance(value, Mapping):
            return {self.value(key, start): self.value(entry, start) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(entry, start) for entry in value]
        return value

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message, marked; what the assistant said keeps the tokens that are no control tokens."""
        said = ("content", "reasoning_content") if message.get("role") == "assistant" else ()
        return {
            key: self.value(value, self._start_of_control if key in said else None) for key, value in message.items()
        }


def _segments(text: str, mark: str, tokens: str) -> list[Segment]:
    segments, end = [], 0
    for match in re.finditer(tokens, text):
        segments += [Segment(text[end : match.start()], False), Segment(match[0], True)]
        end = match.end()
    segments.append(Segment(text[end:], False))
    return [Segment(segment.text.replace(mark, ""), segment.is_token) for segment in segments if segment.text]
