"""Reasoning and content of an answer are told apart, however its text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.reasoning import CLOSE, OPEN, ReasoningSplitter

TRICKY = st.sampled_from([OPEN, CLOSE, "<thi", "</", "<", ">", "\n", "  ", "why", "é"])


def split(pieces: list[str], opened: bool = False) -> tuple[str, str]:
    """The reasoning and the content of a text that arrives in pieces."""
    splitter = ReasoningSplitter(opened)
    pairs = [*map(splitter.push, pieces), splitter.finish()]
    return "".join(reasoning for reasoning, _ in pairs), "".join(content for _, content in pairs)


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("Hello", False, ("", "Hello")),
        ("", False, ("", "")),
        (" \n", False, ("", " \n")),
        ("<th", False, ("", "<th")),
        ("  <b>Hi </think>", False, ("", "  <b>Hi </think>")),
        ("The <think> tag", False, ("", "The <think> tag")),
        ("<think>\nwhy not\n\nyes\n</think>\n\nHello\n", False, ("why not\n\nyes", "Hello\n")),
        ("\n<think>a</think>b<think>c</think>", False, ("a", "b<think>c</think>")),
        ("<think>\n\n</think>\n\nHello", False, ("", "Hello")),
        ("<think>never ends ", False, ("never ends", "")),
        ("<think>a</think> \n", False, ("a", "")),
        ("\nwhy\n</think>\n\nHello", True, ("why", "Hello")),
        ("why", True, ("why", "")),
        ("", True, ("", "")),
    ],
)
def test_what_is_reasoning(text, opened, expected):
    assert split([text], opened) == expected
    for place in range(len(text) + 1):
        assert split([text[:place], text[place:]], opened) == expected
    assert split(list(text), opened) == expected


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(TRICKY, max_size=12).map("".join), st.booleans())
def test_any_cut_gives_the_same(text, opened):
    whole = split([text], opened)
    assert split(list(text), opened) == whole
    for place in range(len(text)):
        assert split([text[:place], text[place:]], opened) == whole


def test_reasoning_is_shown_while_it_goes_on():
    splitter = ReasoningSplitter()
    assert splitter.push("<think>\na b <") == ("a b", "")
    assert splitter.push("c ") == (" <c", "")
    assert splitter.push("</think>\nd") == ("", "d")
