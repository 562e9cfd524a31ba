"""Text to token ids and back, by the checkpoint's own `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tokenizers

from models.errors import CheckpointError, ContextLengthError, PromptError


@dataclass(frozen=True)
class AddedToken:
    """A token that stands outside byte-pair encoding. A `control` token structures the prompt and has no text of its
    own; the others (`<think>`, `<tool_call>`) are ordinary text with one id."""

    token_id: int
    text: str
    control: bool


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes, in which byte-level vocabularies are written."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_of_character()


class Tokenizer:
    """A byte-level BPE vocabulary with added tokens."""

    def __init__(self, definition: str, source: str) -> None:
        """`definition` is the text of a `tokenizer.json`; `source` names it in errors."""
        try:
            full = tokenizers.Tokenizer.from_str(definition)
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{source}: not a usable tokenizer.json: {error}") from None
        if not isinstance(full.decoder, tokenizers.decoders.ByteLevel):
            raise CheckpointError(f"{source}: the vocabulary is not byte-level, as Qwen's is")
        added = sorted(full.get_added_tokens_decoder().items())
        self.added = tuple(AddedToken(token_id, token.content, token.special) for token_id, token in added)
        # The same vocabulary without its added tokens takes every text as ordinary text.
        self._plain = tokenizers.Tokenizer(full.model)
        if full.normalizer is not None:
            self._plain.normalizer = full.normalizer
        if full.pre_tokenizer is not None:
            self._plain.pre_tokenizer = full.pre_tokenizer

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads `tokenizer.json`; CheckpointError if it is missing or unusable."""
        file = folder / "tokenizer.json"
        try:
            definition = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None
        return cls(definition, str(file))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        largest = max(self._plain.get_vocab().values(), default=-1)
        return 1 + max([largest, *(token.token_id for token in self.added)])

    @cached_property
    def control_ids(self) -> frozenset[int]:
        """The ids that structure a prompt and show nothing."""
        return frozenset(token.token_id for token in self.added if token.control)

    @cached_property
    def _added_ids(self) -> dict[str, int]:
        return {token.text: token.token_id for token in self.added}

    @cached_property
    def _added_bytes(self) -> dict[int, bytes]:
        return {token.token_id: b"" if token.control else token.text.encode() for token in self.added}

    def id_of(self, token: str) -> int:
        """The id of an added token.

        Raises:
            PromptError: the vocabulary has no such token.
        """
        if token not in self._added_ids:
            raise PromptError(f"the vocabulary has no token {token!r}")
        return self._added_ids[token]

    @cached_property
    def _longest(self) -> int:
        """Bytes of the longest token of ordinary text; its characters stand for bytes."""
        return max(map(len, self._plain.get_vocab()), default=1)

    def check_length(self, text: str, most: int) -> None:
        """Refuses a text that cannot be `most` tokens or fewer, without encoding it, which takes time and memory.

        Raises:
            ContextLengthError: the text has more bytes than so many tokens can stand for.
        """
        least = -(-len(text.encode("utf-8", "surrogatepass")) // self._longest)
        if least > most:
            raise ContextLengthError(f"the prompt has at least {least} tokens, but the context is limited to {most}")

    def encode_text(self, text: str) -> list[int]:
        """The ids of ordinary text: what looks like a control token in it is encoded as the letters it is made of, and
        half of a surrogate pair (JSON's `"\\ud83d"`) is no character and becomes U+FFFD."""
        characters = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", errors="replace")
        # Other threads run meanwhile, which they cannot while a single text is encoded.
        return self._plain.encode_batch([characters], add_special_tokens=False)[0].ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: possibly a part of a character; none for a control token or a padding row
        of the embedding table."""
        if token_id in self._added_bytes:
            return self._added_bytes[token_id]
        token = self._plain.id_to_token(token_id)
        return b"" if token is None else bytes(BYTE_OF_CHARACTER[character] for character in token)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; control tokens show nothing, bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")
