"""Requests that run together: each says what it says alone, wherever it stands, and whatever is kept of others."""

from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image, ImageDraw

import models
from models import Batch, BatchLimits, LoadedModel, Request, SamplingParams, Step
from models.errors import PromptError
from models.grammar import json_rule

QUESTIONS = (
    "Count from 1 to 8",
    "从1数到12",
    "What is 7 + 8?",
    "Repeat after me: banana QX7 window",
    "Hello!",
    "Who are you?",
)


def picture(seed: int) -> Image.Image:
    """A few shapes on white."""
    drawing = random.Random(seed)
    image = Image.new("RGB", (drawing.choice((96, 128, 160)), 128), "white")
    for _ in range(drawing.randint(1, 3)):
        x, y = drawing.randrange(64), drawing.randrange(90)
        ImageDraw.Draw(image).ellipse((x, y, x + 30, y + 30), fill=drawing.choice(("red", "blue", "green")))
    return image


def mixed_requests(model: LoadedModel, count: int, *, pictures: bool) -> list[dict]:
    """Keyword arguments of requests of all kinds: texts of different lengths, pictures, greedy and sampled, penalties,
    log-probabilities, stop strings, grammars, long and short answers."""
    draw, made = random.Random(5), []
    grammar = model.compile_grammar(f"start: {json_rule({'type': 'array', 'items': {'type': 'integer'}})}")
    for index in range(count):
        content = [{"type": "text", "text": " ".join(draw.choices(QUESTIONS, k=draw.choice((1, 1, 2, 12))))}]
        if pictures and index % 3 == 0:
            content.insert(0, {"type": "image", "image": picture(index % 4)})
        messages = [{"role": "user", "content": content}]
        if index % 4 == 1:
            messages.insert(0, {"role": "system", "content": "You are a small model. " * 8})
        sampling = SamplingParams(
            temperature=draw.choice((0.0, 0.0, 0.7, 1.2)),
            top_p=draw.choice((1.0, 0.9)),
            top_k=draw.choice((0, 20)),
            presence_penalty=draw.choice((0.0, 0.5)),
            seed=index,
            top_logprobs=draw.choice((0, 3)),
        )
        prompt = model.prompt(messages)
        made.append(
            {
                "prompt": prompt,
                "max_tokens": draw.choice((1, 5, 25)),
                "stop": draw.choice(((), ("7",))),
                "sampling": sampling,
                "grammar": grammar if index % 5 == 2 else None,
            }
        )
    return made


def request_of(model: LoadedModel, values: dict) -> Request:
    return model.request(**values)


def run(batch: Batch, requests: list[Request], leaving: dict[int, int] | None = None) -> list[list[Step]]:
    """The steps of every request, which join as there is room, in order, at moments that a seed decides; `leaving` are
    dropped after so many tokens."""
    moments, waiting, told = random.Random(1), list(enumerate(requests)), {}
    steps: list[list[Step]] = [[] for _ in requests]
    while waiting or batch.running:
        while waiting and not batch.full and (not batch.running or moments.random() < 0.5):
            index, request = waiting.pop(0)
            told[batch.join(request)] = index
        for generation, item in batch.step():
            assert not isinstance(item, Exception)
            if isinstance(item, Step):
                steps[told[generation]].append(item)
                if (leaving or {}).get(told[generation]) == len(steps[told[generation]]):
                    batch.leave(generation)
    return steps


@pytest.mark.parametrize(("name", "quant"), [("tiny-vl", None), ("tiny-vl", "q4"), ("tiny-moe", "q8")])
def test_mixed_requests_say_together_what_they_say_alone(name, quant):
    """Bit for bit, log-probabilities and margins included, with what is kept of others used or not."""
    model = models.load(name, quant=quant, max_context=512)
    values = mixed_requests(model, 32, pictures=name == "tiny-vl")
    limits = BatchLimits(rows=8, slots=11, prefill_budget=64, image_cache_bytes=2**20)
    by_itself = BatchLimits(prefill_budget=64, reuse=False)
    alone = [run(model.batch(by_itself), [request_of(model, one)])[0] for one in values]
    batch = model.batch(limits)
    together = run(batch, [request_of(model, one) for one in values])
    assert together == alone
    leaving = {index: index % 5 for index in range(3, 32, 4)}
    left = run(batch, [request_of(model, one) for one in values], leaving)
    for index, steps in enumerate(left):
        assert steps == alone[index][: leaving.get(index) or None]
    assert batch.slots.running == 0
    assert any(slot.held for slot in batch.slots.slots)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return models.load("tiny-vl", quant="q4", max_context=512)


def ask(model: LoadedModel, batch: Batch, messages: list[dict], max_tokens: int = 12) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were in the cache."""
    generation = batch.join(model.request(model.prompt(messages), max_tokens=max_tokens))
    text = ""
    while batch.running:
        text += "".join(item.text for _, item in batch.step() if isinstance(item, Step))
    return text, generation.reused


def user(text: str, image: Image.Image | None = None) -> dict:
    if image is None:
        return {"role": "user", "content": text}
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


def test_a_second_turn_computes_only_what_is_new(model):
    batch = model.batch(BatchLimits(slots=2))
    turns = [user("What is in this picture?", picture(1))]
    first, reused = ask(model, batch, turns)
    assert reused == 0
    turns += [{"role": "assistant", "content": first}, user("How many shapes are there?")]
    length = len(model.prompt(turns).token_ids)
    second, reused = ask(model, batch, turns)
    assert 0.6 * length < reused < length
    assert second == "".join(step.text for step in model.generate(turns, max_tokens=12))


def test_other_pixels_are_another_picture(model):
    batch = model.batch(BatchLimits(slots=2))
    ask(model, batch, [user("What is in this picture?", picture(1))])
    before = len(model.prompt([user("", picture(1))]).token_ids)
    changed = picture(1)
    changed.putpixel((1, 1), (0, 0, 0))
    _, reused = ask(model, batch, [user("What is in this picture?", changed)])
    assert reused < before - model.prompt([user("", changed)]).visuals[0].tokens(2)


def test_a_picture_is_encoded_once(model):
    batch = model.batch(BatchLimits(image_cache_bytes=2**20, reuse=False))
    answers = {ask(model, batch, [user(question, picture(2))])[0] for question in ("Describe it.",) * 2}
    assert len(answers) == 1
    assert (batch.images.queries, batch.images.hits) == (2, 1)


def test_running_streams_go_on_while_a_long_prompt_arrives(model):
    """Between two tokens of a stream at most the budget of another's prompt is computed."""
    batch = model.batch(BatchLimits(rows=2, slots=2, prefill_budget=64))
    prompt = model.prompt([user("Count from 1 to 40")])
    stream = batch.join(model.request(prompt, max_tokens=60))
    while stream.token is None:
        batch.step()
    late = batch.join(model.request(model.prompt([user("word " * 350)]), max_tokens=5))
    tokens, between = 0, []
    while late.token is None:
        for generation, item in batch.step():
            if generation is stream and isinstance(item, Step):
                between.append(late.slot.held - tokens)
                tokens = late.slot.held
    assert len(between) >= 5
    assert max(between) <= 64


def test_short_prompts_pass_a_long_one_but_do_not_keep_it_out(model):
    batch = model.batch(BatchLimits(rows=8, slots=8, prefill_budget=16, reuse=False))
    long = batch.join(model.request(model.prompt([user("word " * 200)]), max_tokens=1))
    finished = []
    asked = 0
    while len(finished) < 30 and long.token is None:
        while not batch.full:
            asked += 1
            batch.join(model.request(model.prompt([user(f"What is {asked % 20} + 3?")]), max_tokens=1))
        finished += [generation for generation, item in batch.step() if isinstance(item, Step)]
    assert finished[0] is not long
    assert long in finished


def test_a_request_that_does_not_fit_its_pictures_costs_nobody_anything(model):
    batch = model.batch(BatchLimits(rows=2, slots=2))
    running = batch.join(model.request(model.prompt([user("Hello!")]), max_tokens=3))
    good = model.prompt([user("What is this?", picture(1))])
    with pytest.raises(PromptError, match="more placeholder tokens"):
        batch.join(model.request(models.Prompt(good.token_ids, ()), max_tokens=3))
    assert batch.running == [running]
    assert batch.slots.running == 1


def test_a_picture_that_fails_takes_only_its_own_request(model, monkeypatch):
    batch = model.batch(BatchLimits(rows=2, slots=2))
    told = {}
    with monkeypatch.context() as patched:

        def fail(*_: object) -> None:
            raise RuntimeError("no tower")

        patched.setattr(type(model.inference), "encode", fail)
        bad = batch.join(model.request(model.prompt([user("What is this?", picture(1))]), max_tokens=3))
        good = batch.join(model.request(model.prompt([user("Hello!")]), max_tokens=3))
        while batch.running:
            for generation, item in batch.step():
                told.setdefault(generation, []).append(item)
    assert isinstance(told[bad][-1], RuntimeError)
    assert told[good][-1].finish_reason is not None


def test_after_a_failed_step_the_batch_begins_anew(model):
    batch = model.batch(BatchLimits(slots=2))
    question = [user("What is 7 + 8?")]
    wanted, _ = ask(model, batch, question)
    batch.join(model.request(model.prompt(question), max_tokens=3))
    batch.abandon()
    assert batch.running == []
    assert ask(model, batch, question) == (wanted, 0)


def test_lengths_at_the_end_of_the_context(model):
    batch = model.batch(BatchLimits(rows=2, slots=2))
    for length in (500, 509, 511):
        ids = np.random.default_rng(length).integers(300, 400, length).astype(np.int32)
        values = {"max_tokens": 20, "sampling": SamplingParams(top_logprobs=2)}
        prompt = models.Prompt(ids, ())
        [steps] = run(batch, [model.request(prompt, ignore_eos=True, **values)])
        assert len(steps) == min(20, 512 - length)
        assert steps == list(model.generate(prompt, ignore_eos=True, **values))


REPETITIVE = ("复述：北京 上海 北京 上海 北京 上海", "复述：苹果 香蕉 苹果 香蕉 苹果 香蕉 苹果 香蕉", "Hello!")


@pytest.mark.parametrize("rows", [1, 3])
def test_drafted_tokens_change_nothing_but_the_number_of_steps(model, rows):
    prompts = [model.prompt([user(text)]) for text in REPETITIVE]

    def requests() -> list[Request]:
        return [model.request(prompt, max_tokens=60, sampling=SamplingParams(top_logprobs=2)) for prompt in prompts]

    alone = [run(model.batch(), [request])[0] for request in requests()]
    decoded = []

    def decode(*arguments: object) -> object:
        decoded[-1] += 1
        return type(model.inference).decode(model.inference, *arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model.inference, "decode", decode)
        for draft in (0, 4):
            decoded.append(0)
            assert run(model.batch(BatchLimits(rows=rows, slots=rows, draft=draft)), requests()) == alone
    assert decoded[1] < decoded[0]


def test_only_plain_greedy_requests_draft(model):
    prompt = model.prompt([user(REPETITIVE[0])])
    for params in (SamplingParams(temperature=0.5, seed=1), SamplingParams(presence_penalty=1.0)):
        wanted = run(model.batch(), [model.request(prompt, max_tokens=30, sampling=params)])
        batch = model.batch(BatchLimits(draft=4))
        generation = batch.join(model.request(prompt, max_tokens=30, sampling=params))
        while generation.token is None:
            batch.step()
        assert generation.draft(4) == []
        batch.leave(generation)
        assert run(batch, [model.request(prompt, max_tokens=30, sampling=params)]) == wanted
