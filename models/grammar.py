"""Grammars that an answer has to follow: after each token, which ones may come next.

A grammar is written in llguidance's variant of Lark (https://github.com/guidance-ai/llguidance, docs/syntax.md);
`json_rule` is the part of it that stands for the JSON texts of a schema. It is compiled for a vocabulary, and every
answer gets a matcher of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from models.errors import GrammarError
from models.tokenizer import Tokenizer

LARGEST_SCHEMA = 65_536  # characters
# The library follows references by recursion, on a stack of 8 MiB; from 1,600 on some schemas overflowed it.
DEEPEST_REFERENCES = 500  # distinct references times levels of nesting
MOST_REMAINDERS = 10_000  # of all numbers behind `multipleOf`: the library follows each, and 10^8 fill the memory
MOST_PATTERNS = 32  # in one object: each is compared with all others, which takes a tenth of a millisecond
WHITE_SPACE = " "  # once between tokens of JSON: more of it takes time, and small models fill an answer with it
ANY_TEXT = r"/(.|\n)*/"
# A step takes time with the square of the grammar's size where alternatives abound: 0.02 s at worst with this one. The
# library's longer error messages hold the answer so far, which is not for logs.
LIMITS = LLParserLimits(max_grammar_size=20_000, verbose_errors=False)


def json_rule(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """The rule for JSON texts that are valid by this JSON Schema (draft 2020-12, as far as llguidance has it), on one
    line, with or without a space between tokens. `lenient` ignores keywords that llguidance lacks.

    Raises:
        GrammarError: the schema is too large or too involved.
    """
    _check_size(schema)
    # The library takes options from a key of the schema, which is not for clients to set.
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": lenient}
    return "%json " + json.dumps(schema | {"x-guidance": options})


def text_rule(text: str) -> str:
    """The rule for just this text."""
    return json.dumps(text)


def tag_rule(tag: str, tokenizer: Tokenizer) -> str:
    """The rule for a tag: its own token where the vocabulary has one."""
    token = _tag_token(tag, tokenizer)
    return text_rule(tag) if token is None else f"<[{token}]>"


def until_rule(name: str, tag: str, tokenizer: Tokenizer) -> str:
    """A line that defines the rule `name`: any text up to the first such tag, which is part of it."""
    lazy = "[lazy]" if _tag_token(tag, tokenizer) is None else ""
    return f"{name}{lazy}: {ANY_TEXT} {tag_rule(tag, tokenizer)}"


def _tag_token(tag: str, tokenizer: Tokenizer) -> int | None:
    return next((token.token_id for token in tokenizer.added if token.text == tag and not token.control), None)


def _check_size(schema: dict[str, Any]) -> None:
    length = len(json.dumps(schema, ensure_ascii=False))
    if length > LARGEST_SCHEMA:
        raise GrammarError(f"a schema may have up to {LARGEST_SCHEMA} characters, found {length}")
    references: set[str] = set()
    remainders = 0
    for part in _objects(schema):
        remainders += _remainders(part.get("multipleOf"))
        if isinstance(part.get("$ref"), str):
            references.add(part["$ref"])
        patterns = part.get("patternProperties")
        if isinstance(patterns, dict) and len(patterns) > MOST_PATTERNS:
            raise GrammarError(f"'patternProperties' may have up to {MOST_PATTERNS} patterns, found {len(patterns)}")
    if remainders > MOST_REMAINDERS:
        raise GrammarError(f"the numbers behind 'multipleOf' may add up to {MOST_REMAINDERS}, found {remainders}")
    levels = _levels(schema)
    if len(references) * levels > DEEPEST_REFERENCES:
        raise GrammarError(
            f"the references of a schema times its levels may be up to {DEEPEST_REFERENCES}, "
            f"found {len(references)} times {levels}"
        )


def _remainders(divisor: Any) -> int:
    """How many remainders a division by a schema's number can leave, in steps of its last decimal."""
    if isinstance(divisor, bool) or not isinstance(divisor, int | float):
        return 0
    exact = Decimal(repr(divisor))
    if not exact.is_finite():
        return 0
    return abs(int(exact.scaleb(max(0, -exact.as_tuple().exponent))))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for entry in value:
            yield from _objects(entry)


def _levels(value: Any) -> int:
    """How deep lists and objects are nested in each other."""
    if isinstance(value, dict):
        value = list(value.values())
    return 1 + max(map(_levels, value), default=0) if isinstance(value, list) else 0


class _Vocabulary:
    """A vocabulary in the form that llguidance reads; its attributes have that library's names. Control tokens and the
    padding rows of the embedding table have no bytes, and so are never allowed. Other added tokens, tags such as
    `<think>`, are special: they come only where a grammar names them, never as text in JSON."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_token: int) -> None:
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab)]
        self.special_token_ids = [token.token_id for token in tokenizer.added if not token.control]
        self.eos_token_id = end_token
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        """How the model would write a text that is certain to come. Encoding may normalise; tokens that spell
        something else would break the grammar, so that such a text goes byte by byte."""
        ids, written = self._tokenizer.encode_text(text), text.encode()
        if b"".join(self.tokens[token] for token in ids) == written:
            return ids
        return [self.tokens.index(bytes([byte])) for byte in written]


class Matcher:
    """Follows one answer through a grammar."""

    def __init__(self, state: LLMatcher, words: int) -> None:
        self._state = state
        self._words = words

    def allowed(self) -> np.ndarray:
        """The tokens that may come next, uint32 `[words]`, as `models.sampling.SamplingState` has them: once the
        grammar is complete, only those that end the answer.

        Raises:
            GrammarError: to find them is more work than the library allows, or nothing can come.
        """
        bits = np.frombuffer(self._state.compute_bitmask(), np.uint32)[: self._words]
        self._check()
        return bits

    def take(self, token: int) -> None:
        """Goes on by the token that was chosen.

        Raises:
            GrammarError: it was not allowed, or is too much work.
        """
        self._state.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._state.is_error():
            raise GrammarError(f"the grammar cannot be followed: {_reason(self._state)}")


class Grammar:
    """A compiled grammar. Never changed, so that threads may share it."""

    def __init__(self, state: LLMatcher, words: int) -> None:
        self._state = state
        self._words = words

    def start(self) -> Matcher:
        """A matcher for a new answer."""
        return Matcher(self._state.deep_copy(), self._words)


class GrammarCompiler:
    """Compiles grammars for one vocabulary. To make it takes a second for a large one, so it is made once."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, end_tokens: Collection[int]) -> None:
        """`vocab` is the number of logits; an `end_tokens` token is what follows on a complete answer.

        Raises:
            GrammarError: there is no token that could end an answer.
        """
        ends = sorted(token for token in end_tokens if token < vocab)
        if not ends:
            raise GrammarError("answers cannot be constrained: the model has no token that ends them")
        self._vocabulary = LLTokenizer(_Vocabulary(tokenizer, vocab, ends[0]), eos_token=ends)
        self._words = -(-vocab // 32)

    def compile(self, grammar: str) -> Grammar:
        """The grammar whose rule `start` is an answer. Takes a millisecond for a small schema, seconds for the worst.

        Raises:
            GrammarError: it is no grammar, no text fits it, or it is too large.
        """
        state = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LIMITS)
        if state.is_error():
            raise GrammarError(_reason(state))
        compiled = Grammar(state, self._words)
        compiled.start().allowed()  # some of what is wrong shows at the first step only
        return compiled


def _reason(state: LLMatcher) -> str:
    """What the library says is wrong, on one line, without the place in the grammar: users wrote the schema only."""
    reason = re.split(r"<non-verbose/>|\n *\d+ \| ", state.get_error())[0]
    reason = re.sub(r'^(at \d+\(\d+\): )?(failed to compile JSON schema: |failed to parse "%json": )?', "", reason)
    return " ".join(reason.split())[:400]
