"""Byte-level BPE with added tokens, on vocabularies small enough to read."""

import json
import re
import threading
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import CheckpointError, PromptError
from models.tokenizer import BYTE_OF_CHARACTER, Tokenizer
from tests.models.vocabularies import ADDED, FIRST_ADDED, small_definition, small_tokenizer

TOKENIZER = small_tokenizer()


@pytest.mark.parametrize("token", ADDED)
def test_text_that_looks_like_a_token_stays_text(token):
    added_ids = {added.token_id for added in TOKENIZER.added}
    for text in (token, f"a {token} b", f"\n{token}{token}\n", f"<{token}>"):
        ids = TOKENIZER.encode_text(text)
        assert not added_ids & set(ids)
        assert TOKENIZER.decode(ids) == text


def test_a_vocabulary_that_lists_its_added_tokens_in_the_model_too():
    """As trainers of the tokenizers library write it."""
    definition = small_definition()
    definition["model"]["vocab"] |= {token["content"]: token["id"] for token in definition["added_tokens"]}
    tokenizer = Tokenizer(json.dumps(definition), "test")
    assert tokenizer.encode_text("<|im_end|><think>") == TOKENIZER.encode_text("<|im_end|><think>")
    assert tokenizer.vocab_size == TOKENIZER.vocab_size


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.text())
def test_text_comes_back(text):
    """The small vocabulary does not normalise, so nothing is lost."""
    assert TOKENIZER.decode(TOKENIZER.encode_text(text)) == text


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size + 5)))
def test_decoding_equals_the_tokenizers_library(ids):
    library = tokenizers.Tokenizer.from_str(json.dumps(small_definition()))
    assert TOKENIZER.decode(ids) == library.decode(ids, skip_special_tokens=True)


def test_text_encodes_as_in_the_tokenizers_library():
    library = tokenizers.Tokenizer.from_str(json.dumps(small_definition()))
    for text in ("hello hello", "", " ", "héllo 😀", "從1数到20\n\n"):
        assert TOKENIZER.encode_text(text) == library.encode(text, add_special_tokens=False).ids


def test_token_bytes_may_be_parts_of_characters():
    ids = TOKENIZER.encode_text("😀")
    assert [TOKENIZER.token_bytes(token) for token in ids] == [b"\xf0\x9f", b"\x98", b"\x80"]
    assert TOKENIZER.token_bytes(TOKENIZER.id_of("<|im_end|>")) == b""
    assert TOKENIZER.token_bytes(TOKENIZER.id_of("<think>")) == b"<think>"
    assert TOKENIZER.token_bytes(TOKENIZER.vocab_size + 100) == b""  # a padding row of the embedding table


def test_every_byte_has_a_token():
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))
    assert [TOKENIZER.token_bytes(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]


def test_broken_bytes_become_replacement_characters():
    broken = [0xF0, 0x9F, ord("a"), 0xFF, 0x80, 0xE2, 0x82]
    assert TOKENIZER.decode(broken) == "\ufffda\ufffd\ufffd\ufffd"


def test_control_tokens_show_nothing_and_do_not_split_characters():
    end = TOKENIZER.id_of("<|im_end|>")
    assert TOKENIZER.decode([0xC3, end, 0xA9, TOKENIZER.id_of("</think>"), end]) == "é</think>"


@pytest.mark.parametrize(
    ("text", "kept"), [("a\ud83d", "a\ufffd"), ("\ude00\ud83d", "\ufffd\ufffd"), ("\ud83d\ude00", "😀")]
)
def test_half_a_surrogate_pair_is_no_character(text, kept):
    assert TOKENIZER.decode(TOKENIZER.encode_text(text)) == kept


def test_ids_of_tokens():
    assert TOKENIZER.control_ids == {TOKENIZER.id_of(token) for token, control in ADDED.items() if control}
    assert TOKENIZER.vocab_size == 1 + max(added.token_id for added in TOKENIZER.added)
    with pytest.raises(PromptError, match=re.escape("no token '<|nothing|>'")):
        TOKENIZER.id_of("<|nothing|>")


def test_truncation_and_template_of_the_file_do_not_touch_text():
    definition = small_definition()
    definition["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    definition["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [FIRST_ADDED], "tokens": ["<|im_start|>"]}},
    }
    tokenizer = Tokenizer(json.dumps(definition), "test")
    assert tokenizer.encode_text("abcdefgh") == TOKENIZER.encode_text("abcdefgh")


def test_other_threads_run_while_a_long_text_is_encoded():
    encoding = threading.Thread(target=TOKENIZER.encode_text, args=("The quick brown fox jumps. " * 5_000,))
    encoding.start()
    moments = 0
    while encoding.is_alive():
        time.sleep(0.001)
        moments += 1
    assert moments > 10


def test_reads_a_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(small_definition()))
    assert Tokenizer.from_folder(tmp_path).encode_text("hello") == TOKENIZER.encode_text("hello")


def test_unusable_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    for content in (b"", b"{}", b"[]", b"\xff\xfe", b"version https://git-lfs.github.com/spec/v1\n"):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(tmp_path)


def test_another_kind_of_vocabulary_is_refused():
    definition = small_definition() | {"decoder": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never"}}
    with pytest.raises(CheckpointError, match="not byte-level"):
        Tokenizer(json.dumps(definition), "test")
