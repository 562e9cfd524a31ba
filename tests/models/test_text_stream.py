"""Pieces of text: they join to the decoded answer, and stop strings never show."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.text_stream import TextStream
from tests.models.vocabularies import small_tokenizer

TOKENIZER = small_tokenizer()
EMOJI = "hi😀👨‍👩‍👧é"


class Pieces:
    """A vocabulary in which a token is any piece of text: ids count through the given pieces."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


def run(tokenizer, ids, stop=()) -> tuple[list[str], bool]:
    """All pieces in order, the last from `finish`."""
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token_id in ids:
        pieces.append(stream.push(token_id))
        if stream.stopped:
            break
    return [*pieces, stream.finish()], stream.stopped


def run_pieces(pieces: list[str | bytes], stop=()) -> tuple[list[str], bool]:
    return run(Pieces(*pieces), range(len(pieces)), stop)


def test_characters_come_whole_though_each_byte_is_a_token():
    pieces, stopped = run(TOKENIZER, EMOJI.encode())
    assert "".join(pieces) == EMOJI
    assert all(piece in ("", *EMOJI) for piece in pieces)
    assert not stopped


def test_a_broken_tail_is_one_replacement_character():
    assert run(TOKENIZER, "a😀".encode()[:-1])[0][-1] == "\ufffd"
    assert run_pieces(["a", b"\xf0\x9f", b"\x98"])[0] == ["a", "", "", "\ufffd"]
    assert run_pieces(["a"])[0] == ["a", ""]


def test_broken_bytes_in_the_middle_come_as_soon_as_they_are_known():
    assert run_pieces([b"\xff", b"\xe2", b"\x82", b"b"])[0] == ["\ufffd", "", "", "\ufffdb", ""]


@settings(derandomize=True, max_examples=500, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=60))
def test_the_pieces_join_to_the_decoded_answer(ids):
    assert "".join(run(TOKENIZER, ids)[0]) == TOKENIZER.decode(ids)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.text(), st.data())
def test_no_piece_has_a_part_of_a_character(text, data):
    content = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(content)))))
    pieces = [content[start:end] for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    found = run_pieces(pieces)[0]
    assert "".join(found) == text
    assert found[-1] == ""


def test_a_stop_string_across_tokens():
    pieces, stopped = run_pieces(["The quick br", "own f", "ox", " jumps"], ["own fox"])
    assert pieces == ["The quick br", "", "", ""]
    assert stopped


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["ab", "cd"], ["cd"], "ab"),
        (["abcd"], ["b"], "a"),
        (["a", "b", "c"], ["abd"], "abc"),  # held and released at the end
        (["aab"], ["ab"], "a"),
        (["a", "a", "b"], ["aab"], ""),
        (["a", "aa", "b"], ["aab"], "a"),  # the held end gets shorter
        (["x\n", "\ny"], ["\n\n"], "x"),
        (["one STOP two STOP"], ["STOP"], "one "),
        (["a b c"], ["c", "b"], "a "),  # the first in the text, not in the list
        (["abcd"], ["bcd", "bc"], "a"),
        (["xabc"], ["c", "abc"], "x"),  # both end at once: the longer hides more
        (["数到2", "0"], ["到20"], "数"),
        (["hé".encode()[:2], "é".encode()[1:] + b"!"], ["é!"], "h"),
        (["abc"], [""], "abc"),
        (["abc"], [], "abc"),
    ],
)
def test_stop_strings(pieces, stop, expected):
    found, stopped = run_pieces(pieces, stop)
    assert "".join(found) == expected
    said = b"".join(Pieces(*pieces).pieces).decode()
    assert stopped == (expected != said)


def whole(text: str, stop: list[str]) -> str:
    """The text before the stop string that is complete first, of those the longest."""
    for end in range(1, len(text) + 1):
        ended = [candidate for candidate in stop if text[:end].endswith(candidate)]
        if ended:
            return text[: end - max(map(len, ended))]
    return text


@settings(derandomize=True, max_examples=500, deadline=None)
@given(
    st.text(alphabet="abé", max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=5), max_size=3),
    st.data(),
)
def test_where_tokens_are_cut_makes_no_difference(text, stop, data):
    content = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(content)))))
    pieces = [content[start:end] for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    found, stopped = run_pieces(pieces, stop)
    assert "".join(found) == whole(text, stop)
    assert stopped == any(candidate in text for candidate in stop)


def test_nothing_is_held_longer_than_a_stop_string_can_explain():
    assert run_pieces(["abc", "x", "ab", "ab"], ["abcd"])[0] == ["", "abcx", "", "ab", "ab"]


def test_a_stop_string_in_the_broken_tail():
    found, stopped = run_pieces(["a", b"\xf0"], ["\ufffd"])
    assert "".join(found) == "a"
    assert stopped


def test_after_the_stop_nothing_comes():
    stream = TextStream(Pieces("a STOP b", "c"), ["STOP"])
    assert [stream.push(0), stream.push(1), stream.finish()] == ["a ", "", ""]
    assert stream.stopped


def test_control_tokens_show_nothing():
    end = TOKENIZER.id_of("<|im_end|>")
    assert run(TOKENIZER, [*b"ok", end])[0] == ["o", "k", "", ""]


def test_a_token_costs_the_same_late_as_early():
    """The held text stays short, whatever has been said before."""
    stream = TextStream(Pieces("ab"), ["abc"])
    for _ in range(10_000):
        stream.push(0)
    assert len(stream._held) <= 2
