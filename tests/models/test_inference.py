"""Chunked prefill, decoding and the buckets they run in."""

import json

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.batch import Batch, BatchLimits
from models.generation import Request, Step
from models.grammar import GrammarCompiler, json_rule
from models.images import VisionInput
from models.inference import CHUNKS, VisualFeatures, capacity_for, plan_chunks, row_buckets
from models.positions import rope_positions
from models.sampling import SamplingParams
from models.switches import Switches
from models.text_stream import NoText

from .conftest import IMAGE
from .vocabularies import small_tokenizer


@settings(derandomize=True, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 5000), st.sampled_from(CHUNKS))
def test_chunks_cover_the_rest_of_the_prompt_and_stay_inside_the_cache(length, start, largest):
    start = min(start, length - 1)
    chunks = list(plan_chunks(length, start, largest))
    ends = start + np.cumsum([chunk.tokens for chunk in chunks])
    assert [chunk.start for chunk in chunks] == [start, *ends[:-1]]
    assert ends[-1] == length
    for chunk in chunks:
        assert chunk.bucket in CHUNKS
        assert chunk.bucket <= largest
        assert chunk.start + chunk.bucket <= capacity_for(length)
    padding = sum(chunk.bucket - chunk.tokens for chunk in chunks)
    assert padding <= max(CHUNKS[0], (length - start) / 3)


def test_batches_grow_by_doubling():
    assert row_buckets(1) == [1]
    assert row_buckets(8) == [1, 2, 4, 8]
    assert row_buckets(6) == [1, 2, 4, 6]


def picture_prompt(length: int, seed: int = 1):
    """Random ids with one 4x6 picture in the first half, and its patches."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, 280, length).astype(np.int32)
    ids[5:11] = IMAGE
    return ids, [VisionInput(random.standard_normal((24, 1536)).astype(np.float32), (1, 4, 6), "image")]


def run(
    inference, ids, visuals, tokens=20, sampling=None, context=1024, end_tokens=frozenset(), grammar=None
) -> list[Step]:
    batch = Batch(inference, context, BatchLimits())
    batch.join(Request(ids, visuals, tokens, end_tokens, sampling or SamplingParams(), NoText(), grammar))
    steps = []
    while batch.running:
        steps += [item for _, item in batch.step() if isinstance(item, Step)]
    return steps


def score(inference, ids, visuals) -> np.ndarray:
    positions, _ = rope_positions(ids, [visual.grid for visual in visuals], inference.config, Switches())
    seen = VisualFeatures.join([inference.encode(visual.patches, visual.grid) for visual in visuals])
    layers, rows = inference.new_cache(1, len(ids)), []
    for chunk in plan_chunks(len(ids)):
        logits, layers = inference.score(layers, inference.chunk_input(0, chunk, ids, positions, seen))
        rows.append(logits)
    return np.concatenate(rows)


@pytest.mark.parametrize("length", [11, 16, 70, 250, 300])
def test_decoding_agrees_with_one_pass_over_the_whole_text(vl_inference, length):
    """Through chunk borders (70, 300), with the picture's delta carried on."""
    ids, visuals = picture_prompt(length)
    steps = run(vl_inference, ids, visuals)
    whole = np.concatenate([ids, [step.token_id for step in steps]]).astype(np.int32)
    logits = score(vl_inference, whole, visuals)[length - 1 : -1]
    best = np.sort(logits, axis=1)
    assert logits.argmax(axis=1).tolist() == whole[length:].tolist()
    np.testing.assert_allclose([step.margin for step in steps], best[:, -1] - best[:, -2], atol=1e-4)


def test_the_last_step_says_why_and_the_context_is_a_limit(vl_inference):
    ids, visuals = picture_prompt(40)
    assert [step.finish_reason for step in run(vl_inference, ids, visuals, 3)] == [None, None, "length"]
    limited = run(vl_inference, ids, visuals, 100, context=44)
    assert len(limited) == 4
    assert limited[-1].finish_reason == "length"


def test_an_end_token_stops_with_no_text(vl_inference):
    ids, visuals = picture_prompt(40)
    first = run(vl_inference, ids, visuals, 2)[1].token_id
    steps = run(vl_inference, ids, visuals, 50, end_tokens=frozenset({first}))
    assert (steps[-1].token_id, steps[-1].finish_reason, steps[-1].text) == (first, "stop", "")


def test_repeated_requests_are_independent(vl_inference):
    """No state is left behind: a picture, then text, then the picture again."""
    ids, visuals = picture_prompt(40)
    first = run(vl_inference, ids, visuals)
    run(vl_inference, np.arange(30, dtype=np.int32), [])
    assert [step.token_id for step in run(vl_inference, ids, visuals)] == [step.token_id for step in first]


def test_after_warm_up_nothing_compiles(vl_inference):
    """200 prompt lengths, 10 picture sizes, greedy and sampled, with and without a grammar."""
    tokenizer = small_tokenizer()
    compiler = GrammarCompiler(tokenizer, 300, {tokenizer.added[0].token_id})
    grammars = [None, compiler.compile(f"start: {json_rule({'type': 'string'})}")]
    vl_inference.compile(512, 100)
    compiled = []

    def listen(event: str, duration: float, **_: object) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for length in range(1, 201):
            sampling = SamplingParams(temperature=length % 2, top_p=0.9, top_logprobs=length % 3, seed=length)
            ids, grammar = np.arange(length, dtype=np.int32) % 250, grammars[length // 2 % 2]
            run(vl_inference, ids, [], 2, sampling, 512, grammar=grammar)
        for width in range(1, 11):
            grid = (1, 4, 2 * width)
            ids = np.full(2 * width + 230, IMAGE, np.int32)
            ids[2 * width :] = 7
            patches = np.ones((8 * width, 1536), np.float32)
            run(vl_inference, ids, [VisionInput(patches, grid, "image")], 20, None, 512)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_answer_follows_its_grammar_and_then_ends(vl_inference, temperature):
    """Random weights would never write JSON."""
    tokenizer = small_tokenizer()
    end = tokenizer.added[0].token_id
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 3, "maxItems": 3}
    grammar = GrammarCompiler(tokenizer, 300, {end}).compile(f"start: {json_rule(schema)}")
    for seed in range(3):
        sampling = SamplingParams(temperature=temperature, seed=seed)
        ids = np.arange(9, dtype=np.int32)
        steps = run(vl_inference, ids, [], 99, sampling, 512, frozenset({end}), grammar)
        written = json.loads(tokenizer.decode([step.token_id for step in steps[:-1]]))
        assert (len(written), set(written) - {"red", "blue"}) == (3, set())
        assert (steps[-1].token_id, steps[-1].finish_reason) == (end, "stop")
