"""What a batch takes back from files after a restart: it computes less, and every answer is the same to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

import models
from models import Batch, BatchLimits, LoadedModel, Request, SamplingParams, Step
from models.slots import LEAST_REUSED

from .test_batch import ask, mixed_requests, picture, request_of, run, user
from .test_disk_cache import block_files, flip_a_bit

SYSTEM = {"role": "system", "content": "You are a small model. " * 12}
FIRST = [SYSTEM, user("What is in this picture?", picture(1))]
SLOTS = 5  # the same for all batches, which need not be compiled anew then
ALONE = BatchLimits(slots=SLOTS, prefill_budget=64, reuse=False)


@pytest.fixture(scope="module", params=[None, "q4"])
def model(request) -> LoadedModel:
    return models.load("tiny-vl", quant=request.param, max_context=512)


def limits(folder: Path | None, **others: int) -> BatchLimits:
    return BatchLimits(**{"slots": SLOTS, "prefill_budget": 64, "disk_folder": folder, "disk_bytes": 2**28} | others)


def second_turn(model: LoadedModel, folder: Path | None, owner: str = "") -> tuple[list[dict], Batch]:
    """A conversation whose first turn a batch has answered for an owner, and that batch."""
    batch = model.batch(limits(folder))
    [steps] = run(batch, [model.request(model.prompt(FIRST), max_tokens=12, owner=owner)])
    answer = {"role": "assistant", "content": "".join(step.text for step in steps)}
    return [*FIRST, answer, user("How many shapes are there?")], batch


def asked(model: LoadedModel, turns: list[dict], owner: str = "") -> Request:
    sampling = SamplingParams(temperature=0.7, seed=3, top_logprobs=3)
    return model.request(model.prompt(turns), max_tokens=12, sampling=sampling, owner=owner)


def answered(batch: Batch, request: Request) -> tuple[list[Step], int]:
    """The steps of a request, and how many tokens of its prompt were not computed."""
    generation, steps = batch.join(request), []
    while batch.running:
        steps += [item for _, item in batch.step() if isinstance(item, Step)]
    return steps, generation.reused


def test_the_second_turn_after_a_restart_computes_only_what_is_new(model, tmp_path):
    turns, before = second_turn(model, tmp_path, owner="one")
    before.close()
    _, in_memory = answered(second_turn(model, None)[1], asked(model, turns))
    alone, _ = answered(model.batch(ALONE), asked(model, turns))
    after = model.batch(limits(tmp_path))
    assert answered(after, asked(model, turns, "two")) == (alone, 0)
    queries = after.images.queries
    steps, reused = answered(after, asked(model, turns, "one"))
    assert steps == alone
    assert reused == after.disk.read_tokens == in_memory // LEAST_REUSED * LEAST_REUSED > 100
    assert after.images.queries == queries, "the picture is in what was read"
    assert after.disk.hits == 1


@pytest.mark.parametrize("model", ["q4"], indirect=True)
def test_other_weights_do_not_see_it(model, tmp_path):
    turns, before = second_turn(model, tmp_path)
    before.close()
    other = models.load("tiny-vl", quant="q8", max_context=512)
    assert answered(other.batch(limits(tmp_path)), asked(other, turns))[1] == 0
    assert answered(model.batch(limits(tmp_path)), asked(model, turns))[1] > 100


def test_from_a_damaged_file_on_everything_is_computed(model, tmp_path):
    turns, before = second_turn(model, tmp_path)
    before.close()
    alone, _ = answered(model.batch(ALONE), asked(model, turns))
    after = model.batch(limits(tmp_path))
    second = after.disk.find(model_keys(model, turns), "", 0)[1]
    flip_a_bit(tmp_path / f"{second.name}.safetensors")
    assert answered(after, asked(model, turns)) == (alone, 64)
    after.close()
    assert answered(model.batch(limits(tmp_path)), asked(model, turns))[1] > 100


def model_keys(model: LoadedModel, turns: list[dict]) -> object:
    """What the tokens of a conversation are in files."""
    generation = model.batch(ALONE).join(asked(model, turns))
    return generation.keys


def test_requests_that_come_together_after_a_restart_say_what_they_say_alone(model, tmp_path):
    values = mixed_requests(model, 12, pictures=True)
    alone = [run(model.batch(ALONE), [request_of(model, one)])[0] for one in values]
    several = limits(tmp_path, rows=4, image_cache_bytes=2**20)
    for restarts in range(2):
        batch = model.batch(several)
        assert run(batch, [request_of(model, one) for one in values]) == alone
        assert batch.disk.hits > 2 * restarts
        batch.close()
    assert len(block_files(tmp_path)) == batch.disk.files


def test_running_streams_go_on_while_files_are_read(model, tmp_path):
    turns, before = second_turn(model, tmp_path)
    before.close()
    batch = model.batch(limits(tmp_path, rows=2))
    stream = batch.join(model.request(model.prompt([user("Count from 1 to 40")]), max_tokens=60))
    while stream.token is None:
        batch.step()
    late, between, tokens = batch.join(asked(model, turns)), [], 0
    while late.token is None:
        for generation, item in batch.step():
            if generation is stream and isinstance(item, Step):
                between.append(late.slot.held - tokens)
                tokens = late.slot.held
    assert late.reused > 100
    assert len(between) >= 2
    assert max(between) <= 64


def test_what_a_request_has_computed_before_its_client_left_is_kept(model, tmp_path):
    batch = model.batch(limits(tmp_path))
    generation = batch.join(asked(model, FIRST))
    while generation.unseen or generation.left > 60:
        batch.step()
    batch.leave(generation)
    batch.close()
    assert answered(model.batch(limits(tmp_path)), asked(model, FIRST))[1] >= 64


def test_after_a_failed_step_files_are_still_there(model, tmp_path):
    turns, batch = second_turn(model, tmp_path)
    alone = ask(model, model.batch(ALONE), turns)[0]
    batch.join(asked(model, turns))
    batch.abandon()
    text, reused = ask(model, batch, turns)
    assert text == alone
    assert reused > 100
