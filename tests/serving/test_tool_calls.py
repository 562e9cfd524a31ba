"""The parser of tool calls: every cut of a text gives the same calls and the same content, and no tag is content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.tool_calls import CLOSE, OPEN, ToolCall, ToolCallParser

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
NAMES = st.text(min_size=1)
TRICKY = st.sampled_from(
    [OPEN, CLOSE, "<tool_call", "</tool_", "<", '"', "\\", "{", "}", "\n", " ", "é😀", "text", "1"]
)
CALL_TEXT = '{"name": "now", "arguments": {}}'


def parsed(pieces: list[str], **options) -> tuple[str, list[ToolCall]]:
    """The content and the calls of a text that arrives in pieces."""
    parser = ToolCallParser(**options)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(parts), "an empty part is no part"
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [part for part in parts if isinstance(part, ToolCall)]


def block(name: str, arguments: dict) -> str:
    return f"{OPEN}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{CLOSE}"


def cut(data: st.DataObject, text: str) -> list[str]:
    """The text in pieces, the empty one included."""
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call", "no call", []),
        ("  a <b> \n", "  a <b> \n", []),
        (f"{OPEN}\n{CALL_TEXT}\n{CLOSE}", "", [("now", "{}")]),
        (f"Let me see.\n{OPEN}{CALL_TEXT}{CLOSE}\n{OPEN}{CALL_TEXT}{CLOSE}\n", "Let me see.", [("now", "{}")] * 2),
        (f"a {OPEN}{CALL_TEXT}{CLOSE} b", "ab", [("now", "{}")]),
        (f'{OPEN}{{"name": "now"}}{CLOSE}', "", [("now", "{}")]),
        (f'{OPEN}{{"name": "now", "arguments": null}}{CLOSE}', "", [("now", "{}")]),
        (f'{OPEN}{{"arguments": {{"x": [1, "ü"]}}, "name": "f"}}{CLOSE}', "", [("f", '{"x": [1, "ü"]}')]),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": "a\nb"}}}}{CLOSE}', "", [("f", '{"x": "a\\nb"}')]),
        (f"{OPEN}{CALL_TEXT}", "", [("now", "{}")]),
        (f"{OPEN}{CALL_TEXT}\n{OPEN}{CALL_TEXT}{CLOSE}", "", [("now", "{}")] * 2),
        (f"{OPEN}not json{CLOSE} b", "not json b", []),
        (f'{OPEN}{{"name": "f", "arguments": 5}}{CLOSE}', '{"name": "f", "arguments": 5}', []),
        (f'{OPEN}{{"name": "", "arguments": {{}}}}{CLOSE}', '{"name": "", "arguments": {}}', []),
        (f"{OPEN}[1]{CLOSE}", "[1]", []),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": NaN}}}}{CLOSE}', '{"name": "f", "arguments": {"x": NaN}}', []),
        (f'{OPEN}{{"name": "f", "arguments": {{"x": 1e999}}}}{CLOSE}', '{"name": "f", "arguments": {"x": 1e999}}', []),
        (f'{OPEN}{{"name": "\\ud800"}}{CLOSE}', '{"name": "\\ud800"}', []),
        (f"{OPEN}{'[' * 100_000}{CLOSE}", "[" * 100_000, []),
        (f'{OPEN}{{"name": "f', '{"name": "f', []),
        (f'{OPEN}{{"name": "f}}{CLOSE}\n{OPEN}{CALL_TEXT}{CLOSE}', '{"name": "f}', [("now", "{}")]),
        (f"a{CLOSE}b", "ab", []),
    ],
)
def test_what_is_a_call_and_what_is_content(text, content, calls):
    expected = (content, [ToolCall(*call) for call in calls])
    assert parsed([text]) == expected
    if len(text) < 1000:
        assert parsed(list(text)) == expected


def test_every_cut_of_an_answer():
    """Tags, quotes, braces and escapes inside of strings included."""
    arguments = {"text": f'say "{CLOSE}" or {OPEN}, {{\\}}', "ü": [{}, None, "\n"]}
    answer = f"I look.\n{block('look', arguments)}\n{block('now', {})}"
    expected = ("I look.", [ToolCall("look", json.dumps(arguments, ensure_ascii=False)), ToolCall("now", "{}")])
    for place in range(len(answer) + 1):
        assert parsed([answer[:place], answer[place:]]) == expected
    assert parsed(list(answer)) == expected


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(st.tuples(NAMES, st.dictionaries(st.text(), JSON, max_size=3)), max_size=3), st.data())
def test_all_calls_come_back(calls, data):
    """Whatever their strings hold."""
    content, found = parsed(cut(data, "\n".join(block(*call) for call in calls)))
    assert content == ""
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(TRICKY | st.just(CALL_TEXT), max_size=12).map("".join), st.data())
def test_any_cut_gives_the_same(text, data):
    whole = parsed([text])
    assert parsed(cut(data, text)) == whole
    assert parsed(list(text)) == whole
    assert OPEN not in whole[0]
    assert CLOSE not in whole[0]
    for call in whole[1]:
        assert isinstance(json.loads(call.arguments), dict)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(TRICKY, max_size=12).map("".join).filter(lambda text: OPEN not in text and CLOSE not in text))
def test_text_without_tags_is_not_changed(text):
    assert parsed(list(text)) == (text, [])


def test_a_call_is_told_as_soon_as_it_is_complete():
    parser = ToolCallParser()
    assert parser.push(f"a{OPEN}{CALL_TEXT}") == ["a"]
    assert parser.push(CLOSE) == [ToolCall("now", "{}")]
    assert parser.push(" b <") == ["b"]


def test_only_one_call():
    answer = f"a{OPEN}{CALL_TEXT}{CLOSE} b {OPEN}{CALL_TEXT}{CLOSE} c "
    assert parsed(list(answer), only_one=True) == ("a", [ToolCall("now", "{}")])
