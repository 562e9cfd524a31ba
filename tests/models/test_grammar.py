"""What grammars let through, token by token, with the vocabularies of tiny-vl and of the tests."""

from __future__ import annotations

import json
import random
from enum import Enum
from typing import Annotated, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field

from models.errors import GrammarError
from models.grammar import (
    LARGEST_SCHEMA,
    MOST_PATTERNS,
    GrammarCompiler,
    Matcher,
    json_rule,
    tag_rule,
    text_rule,
    until_rule,
)
from models.model import PRETRAINED
from models.tokenizer import Tokenizer

from .vocabularies import small_tokenizer

VOCAB = 2100  # more rows than tiny-vl has tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(PRETRAINED / "tiny-vl")


@pytest.fixture(scope="module")
def ends(tokenizer) -> set[int]:
    return {tokenizer.id_of("<|im_end|>"), tokenizer.id_of("<|endoftext|>")}


@pytest.fixture(scope="module")
def compiler(tokenizer, ends) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB, ends)


def tokens_of(matcher: Matcher) -> list[int]:
    """What may come next."""
    bits = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little")
    assert len(bits) == 32 * -(-VOCAB // 32)
    return np.flatnonzero(bits).tolist()


def takes(matcher: Matcher, tokenizer: Tokenizer, text: str) -> bool:
    """Goes on by a text, one byte per token; whether each of them may come."""
    for byte in text.encode():
        token = next(token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token) == bytes([byte]))
        if token not in tokens_of(matcher):
            return False
        matcher.take(token)
    return True


def random_text(compiler: GrammarCompiler, tokenizer: Tokenizer, ends: set[int], grammar: str, seed: int) -> str:
    """A text of the grammar, chosen at random among tokens."""
    draw, matcher, written = random.Random(seed), compiler.compile(grammar).start(), []
    while (token := draw.choice(tokens_of(matcher))) not in ends:
        written.append(token)
        matcher.take(token)
    return tokenizer.decode(written)


class Colour(Enum):
    RED = "red"
    NAVY = "navy blue"


class Circle(BaseModel):
    kind: Literal["circle"]
    radius: Annotated[float, Field(gt=0, le=9)]


class Square(BaseModel):
    kind: Literal["square"]
    side: Annotated[int, Field(ge=1, le=12, multiple_of=3)]


class Drawing(BaseModel):
    """Most of what pydantic makes schemas of."""

    model_config = ConfigDict(extra="forbid")
    title: Annotated[str, Field(min_length=1, max_length=12)]
    code: Annotated[str, Field(pattern=r"^[A-Z]{2}-\d{3}$")]
    colours: Annotated[list[Colour], Field(min_length=1, max_length=3)]
    shape: Circle | Square
    shown: bool
    note: Annotated[str, Field(max_length=3)] | None
    größe: Literal[1, 2]
    inner: Annotated[list[Drawing], Field(max_length=1)]


def test_any_text_of_a_schema_is_valid(compiler, tokenizer, ends):
    grammar = f"start: {json_rule(Drawing.model_json_schema())}"
    drawings = [
        Drawing.model_validate_json(random_text(compiler, tokenizer, ends, grammar, seed), strict=True)
        for seed in range(8)
    ]
    assert {type(drawing.shape) for drawing in drawings} == {Circle, Square}
    assert len({drawing.title for drawing in drawings}) == len(drawings)


def test_only_ends_follow_on_a_complete_text(compiler, tokenizer, ends):
    matcher = compiler.compile(f"start: {json_rule({'const': 1})}").start()
    assert takes(matcher, tokenizer, "1")
    assert set(tokens_of(matcher)) == ends
    matcher.take(min(ends))
    assert set(tokens_of(matcher)) == ends, "whoever goes on past the end stays there"


def test_a_number_may_end_or_go_on(compiler, tokenizer, ends):
    matcher = compiler.compile(f"start: {json_rule({'type': 'integer'})}").start()
    assert not ends & set(tokens_of(matcher))
    assert takes(matcher, tokenizer, "12")
    assert ends < set(tokens_of(matcher))


def test_tokens_that_are_no_text_are_never_in_a_string(compiler, tokenizer, ends):
    """Control tokens, tags, and rows of the logits without a token."""
    matcher = compiler.compile(f"start: {json_rule({'type': 'string'})}").start()
    assert takes(matcher, tokenizer, '"<think>')
    allowed = set(tokens_of(matcher))
    assert len(allowed) > 1000
    assert not allowed & {token.token_id for token in tokenizer.added}
    assert max(allowed) < tokenizer.vocab_size


def test_what_is_certain_is_written_as_the_model_would(compiler, tokenizer):
    name = "你好 hello count"
    matcher = compiler.compile(f"start: {json_rule({'const': name})}").start()
    assert takes(matcher, tokenizer, '"')
    for token in tokenizer.encode_text(name)[:-1]:
        assert tokens_of(matcher) == [token]
        matcher.take(token)


def test_a_text_that_encoding_would_change_is_kept(tokenizer, ends):
    """Qwen's vocabulary normalises what it encodes: `e` and an accent become one character."""
    plain = small_tokenizer()
    encode = plain.encode_text
    plain.encode_text = lambda text: encode(text.replace("e\u0301", "\u00e9"))
    compiler = GrammarCompiler(plain, VOCAB, {plain.id_of("<|im_end|>")})
    matcher = compiler.compile(f"start: {json_rule({'const': 'e' + chr(0x301)})}").start()
    assert takes(matcher, plain, '"e\u0301"')


def test_a_space_may_stand_between_tokens_of_json(compiler, tokenizer):
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    grammar = compiler.compile(f"start: {json_rule(schema)}")
    for text in ('{"a":1}', '{"a": 1}', '{ "a" : 1 }'):
        assert takes(grammar.start(), tokenizer, text), text
    for text in (' {"a":1}', '{"a":1} ', '{"a":  1}', '{\n"a":1}'):
        assert not takes(grammar.start(), tokenizer, text), text


def test_matchers_of_one_grammar_are_independent(compiler, tokenizer):
    grammar = compiler.compile(f"start: {json_rule({'const': [1, 2]})}")
    first, second = grammar.start(), grammar.start()
    assert takes(first, tokenizer, "[1")
    assert takes(second, tokenizer, "[1,2]")
    assert takes(first, tokenizer, ",2]")


def test_a_token_that_may_not_come_is_an_error(compiler, tokenizer):
    matcher = compiler.compile(f"start: {json_rule({'const': 1})}").start()
    with pytest.raises(GrammarError, match="cannot be followed"):
        matcher.take(tokenizer.encode_text("x")[0])


def test_texts_and_tags_around_json(compiler, tokenizer, ends):
    """A tag is its own token where the vocabulary has it, otherwise its letters. What looks like it before is text."""
    for tag, spelled in (("</think>", ""), ("</plan>", "</plan>")):
        lines = [f"start: before {text_rule('=')} {json_rule({'const': 1})}", until_rule("before", tag, tokenizer)]
        matcher = compiler.compile("\n".join(lines)).start()
        assert takes(matcher, tokenizer, '{"why" </plan ' + spelled)
        if not spelled:
            matcher.take(tokenizer.id_of(tag))
        assert takes(matcher, tokenizer, "=1")
        assert set(tokens_of(matcher)) == ends
    assert tag_rule("</plan>", tokenizer) == '"</plan>"'


def test_a_client_cannot_set_the_librarys_options(compiler, tokenizer):
    schema = {"const": [1, 2], "x-guidance": {"item_separator": ";"}}
    assert takes(compiler.compile(f"start: {json_rule(schema)}").start(), tokenizer, "[1,2]")


def test_lenient_ignores_what_the_grammar_lacks(compiler, tokenizer):
    schema = {"type": "integer", "format": "int32", "not": {"const": 5}}
    assert takes(compiler.compile(f"start: {json_rule(schema, lenient=True)}").start(), tokenizer, "5")


def chain(length: int) -> dict:
    """A schema whose references lead from one to the next."""
    links = {f"a{index}": {"items": {"$ref": f"#/$defs/a{index + 1}"}} for index in range(length)}
    return {"$defs": links | {f"a{length}": {"type": "integer"}}, "$ref": "#/$defs/a0"}


def choices(count: int) -> dict:
    """A schema of `count` alternatives between two, which have to be multiplied out."""
    both = [[{"properties": {f"a{i}": {"type": kind}}} for kind in ("string", "integer")] for i in range(count)]
    return {"type": "object", "allOf": [{"anyOf": [{"type": "object"} | one for one in pair]} for pair in both]}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ."uniqueItems"'),
        ({"type": "string", "format": "poem"}, "Unknown format: poem"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"properties": 5}, "properties must be an object"),
        ({"type": "number", "minimum": 10**400}, "number out of range"),
        ({"type": "number", "minimum": float("inf")}, "expected value"),
        ({"$ref": "#/$defs/nowhere"}, "'/.defs/nowhere' does not exist"),
        ({"$ref": "http://127.0.0.1:9/x"}, "does not fetch"),
        ({"$ref": "#"}, "cannot be followed"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"enum": ["x" * LARGEST_SCHEMA]}, f"up to {LARGEST_SCHEMA} characters, found 655"),
        ({"patternProperties": {f"^{i}": {} for i in range(MOST_PATTERNS + 1)}}, "up to 32 patterns, found 33"),
        ({"type": "integer", "multipleOf": 10**8 + 7}, "may add up to 10000, found 100000007"),
        ({"type": "integer", "multipleOf": 10**400}, "may add up to 10000, found 10"),
        ({"anyOf": [{"multipleOf": 0.07}, {"multipleOf": 9999}]}, "may add up to 10000, found 10006"),
        (chain(125), "references of a schema times its levels may be up to 500, found 126 times 4"),
        (choices(10), "too big"),
        (choices(16), "schema too large"),
    ],
)
def test_schemas_that_are_refused(compiler, schema, message):
    """Also those on which the library would exhaust its stack, or work for minutes."""
    with pytest.raises(GrammarError, match=message) as error:
        compiler.compile(f"start: {json_rule(schema)}")
    assert "%json" not in str(error.value), "only the schema is the client's"


def test_schemas_at_the_limits(compiler, tokenizer):
    compiler.compile(f"start: {json_rule(chain(124))}")
    names = {"enum": [str(index) for index in range(7600)]}
    assert len(json.dumps(names)) > 0.9 * LARGEST_SCHEMA
    assert takes(compiler.compile(f"start: {json_rule(names)}").start(), tokenizer, '"7599"')


def test_a_grammar_that_becomes_too_much_work_ends_the_answer(compiler, tokenizer):
    schema = {"type": "string", "pattern": "^(a?){1000}a{1000}$"}
    matcher = compiler.compile(f"start: {json_rule(schema)}").start()
    with pytest.raises(GrammarError, match="cannot be followed: lexer error") as error:
        takes(matcher, tokenizer, '"aaaa')
    assert "<" not in str(error.value)


def test_a_model_without_an_end_cannot_be_constrained(tokenizer):
    with pytest.raises(GrammarError, match="no token that ends"):
        GrammarCompiler(tokenizer, VOCAB, set())
