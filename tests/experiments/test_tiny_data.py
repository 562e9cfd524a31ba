"""Batches: what is trained on is what inference will see, and nothing of the evaluation leaks into it."""

from itertools import islice
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from experiments.tiny_data import (
    Encoder,
    before_held_out,
    conversations,
    evaluation_batches,
    shape_of,
    training_batches,
)
from experiments.tiny_drills import drills
from experiments.tiny_models import WEIGHTS, TinyModel
from experiments.tiny_pictures import picture_tasks
from experiments.tiny_tasks import Message, Task, arithmetic, counting, held_out, text_tasks
from experiments.train_tiny import make_encoder
from models.chat_template import default_chat_template
from models.positions import rope_positions
from models.prompt import PromptBuilder
from models.switches import Switches
from models.tokenizer import Tokenizer as InferenceTokenizer

ALL_TASKS = text_tasks(True) | picture_tasks() | drills(True)


@pytest.fixture
def encoder(small_vl: TinyModel, tiny_tokenizer: Tokenizer) -> Encoder:
    return make_encoder(small_vl, tiny_tokenizer)


@pytest.fixture
def prompts(encoder: Encoder) -> PromptBuilder:
    """What inference makes prompts with."""
    tokenizer = InferenceTokenizer(encoder.tokenizer.to_str(), "test")
    return PromptBuilder(tokenizer, default_chat_template(), encoder.processor, encoder.config)


@pytest.mark.parametrize("name", ALL_TASKS)
def test_training_sees_what_inference_will(name: str, encoder: Encoder, prompts: PromptBuilder) -> None:
    random = Random(name)
    for _ in range(5):
        messages = [{"role": "system", "content": "Be polite."}, *ALL_TASKS[name](random)]
        example = encoder.example(messages)
        prompt = prompts.build(messages[:-1])
        assert example.ids[: len(prompt.token_ids)].tolist() == prompt.token_ids.tolist()
        assert [picture.content_hash for picture in example.pictures] == [
            picture.content_hash for picture in prompt.visuals
        ]


@pytest.mark.parametrize("name", ["conversation", "picture: second turn", "greeting"])
def test_the_loss_counts_the_answers_and_their_ends(name: str, encoder: Encoder) -> None:
    messages = ALL_TASKS[name](Random(7))
    example = encoder.example(messages)
    predicted = example.ids[1:][example.weights[:-1] > 0]
    said = "".join(f"{message['content']}<|im_end|>" for message in messages if message["role"] == "assistant")
    assert encoder.tokenizer.decode(predicted.tolist(), skip_special_tokens=False) == said


def test_rows_of_a_batch_are_their_examples(encoder: Encoder) -> None:
    random = Random(1)
    examples = [encoder.example(picture_tasks()["picture: place"](random)) for _ in range(3)]
    batch = encoder.batch(examples, 4, 96, 1)
    for row, example in enumerate(examples):
        length = len(example.ids)
        grids = [picture.grid for picture in example.pictures]
        assert batch.ids[row, :length].tolist() == example.ids.tolist()
        assert not batch.weights[row, length:].any()
        expected = rope_positions(example.ids, grids, encoder.config, Switches())[0]
        assert np.array_equal(batch.positions[:, row, :length], expected)
    assert not batch.weights[3].any()


def test_placeholders_point_at_their_own_picture(encoder: Encoder) -> None:
    random = Random(2)
    examples = [encoder.example(picture_tasks()["picture: describe"](random)) for _ in range(3)]
    batch = encoder.batch(examples, 3, 96, 1)
    per_picture = batch.patches.shape[1] // encoder.config.vision.merge**2
    assert np.array_equal(batch.visual_index >= 0, batch.ids == encoder.config.image_token)
    for row, example in enumerate(examples):
        (picture,) = example.pictures
        assert np.array_equal(batch.patches[row, : len(picture.patches)], picture.patches)
        rows = batch.visual_index[row][batch.visual_index[row] >= 0]
        assert rows.tolist() == list(range(row * per_picture, row * per_picture + picture.tokens(2)))


def test_training_never_shows_a_held_out_turn() -> None:
    tasks: dict[str, tuple[Task, float]] = {
        name: (task, 1.0) for name, task in (text_tasks(False) | drills(False)).items()
    }
    for messages in islice(conversations(tasks, Random(3), evaluation=False), 600):
        ends = [end for end, message in enumerate(messages, 1) if message["role"] == "assistant"]
        assert not any(held_out(messages[:end]) for end in ends)


def test_training_and_evaluation_share_no_prompt() -> None:
    tasks: dict[str, tuple[Task, float]] = {"counting": (counting, 1.0), "arithmetic": (arithmetic, 1.0)}

    def said(evaluation: bool, count: int) -> set[str]:
        source = conversations(tasks, Random(4), evaluation=evaluation)
        return {repr(messages[:-1]) for messages in islice(source, count)}

    assert not said(False, 6000) & said(True, 300)


def test_a_drill_ends_before_the_first_held_out_turn() -> None:
    random, cut = Random(5), 0
    for _ in range(200):
        messages: list[Message] = drills(False)["drill: told"](random)
        kept = before_held_out(messages)
        assert messages[: len(kept)] == kept
        assert not kept or kept[-1]["role"] == "assistant"
        cut += len(kept) < len(messages)
    assert 20 < cut < 120


def test_training_batches_are_mostly_full(encoder: Encoder, small_vl: TinyModel) -> None:
    taught = small_vl.tasks() | drills(True)
    source = training_batches(encoder, {name: (task, WEIGHTS[name]) for name, task in taught.items()}, "fill")
    filled = [np.mean(batch.ids > 0) for batch in islice(source, 12)]
    assert np.mean(filled) > 0.7


def test_same_seed_same_batch(encoder: Encoder) -> None:
    tasks: dict[str, tuple[Task, float]] = {"counting": (counting, 1.0)}
    one, other = (next(training_batches(encoder, tasks, "seed")) for _ in range(2))
    assert np.array_equal(one.ids, other.ids)


def test_evaluation_counts_what_was_asked_for(encoder: Encoder) -> None:
    batches = list(evaluation_batches(encoder, counting, 30, "count"))
    assert sum(rows for _, rows in batches) == 30
    assert all((batch.weights[:rows] > 0).any(axis=1).all() for batch, rows in batches)


def test_nothing_is_too_long_to_be_trained_on_often(encoder: Encoder) -> None:
    random = Random(6)
    for name, task in ALL_TASKS.items():
        fitting = [shape_of(encoder.example(task(random))) is not None for _ in range(20)]
        assert np.mean(fitting) > 0.8, name
