"""Batches: what is trained on is what inference will see, and nothing of the evaluation leaks into it."""

from itertools import islice
from random import Random

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from experiments import tiny_data
from experiments.tiny_data import (
    FULL_WEIGHT,
    LEAST_WEIGHT,
    MOST_PATCHES,
    Encoder,
    Pictures,
    before_held_out,
    conversations,
    evaluation_batches,
    picture_batches,
    shape_of,
    training_batches,
)
from experiments.tiny_drills import drills
from experiments.tiny_models import WEIGHTS, TinyModel
from experiments.tiny_pictures import COLOURS, SHAPES, Scene, Shape, picture_tasks, scene
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
    return PromptBuilder(tokenizer, default_chat_template(), encoder.processor, encoder.config, 4096)


@pytest.mark.parametrize("name", ALL_TASKS)
def test_training_sees_what_inference_will(name: str, encoder: Encoder, prompts: PromptBuilder) -> None:
    random = Random(name)
    for _ in range(5):
        messages = [{"role": "system", "content": "Be polite."}, *ALL_TASKS[name](random)]
        example = encoder.example(messages)
        prompt = prompts.build(messages[:-1])
        assert example.ids[: len(prompt.token_ids)].tolist() == prompt.token_ids.tolist()
        assert [encoder.processor(picture).content_hash for picture in example.pictures] == [
            picture.content_hash for picture in prompt.visuals
        ]


@pytest.mark.parametrize("name", ["conversation", "picture: second turn", "greeting"])
def test_the_loss_counts_the_answers_and_their_ends(name: str, encoder: Encoder) -> None:
    messages = ALL_TASKS[name](Random(7))
    example = encoder.example(messages)
    predicted = example.ids[1:][example.weights[:-1] > 0]
    said = "".join(f"{message['content']}<|im_end|>" for message in messages if message["role"] == "assistant")
    assert encoder.tokenizer.decode(predicted.tolist(), skip_special_tokens=False) == said


def answer_weights(encoder: Encoder, answer: str) -> list[float]:
    """The weights of the tokens of an answer, with its end."""
    example = encoder.example([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}])
    body = len(encoder.tokenizer.encode(f"{answer}<|im_end|>").ids)
    assert np.count_nonzero(example.weights) == body
    return example.weights[example.weights > 0].tolist()


@pytest.mark.parametrize("digits", [1, 2, 3, FULL_WEIGHT - 1])
def test_every_token_of_a_short_answer_counts_fully(digits: int, encoder: Encoder) -> None:
    assert answer_weights(encoder, "123456789"[:digits]) == [1.0] * (digits + 1)


@pytest.mark.parametrize(
    ("digits", "first", "inner"),
    [(FULL_WEIGHT, 10 / 11, 10 / 11), (15, 10 / 16, 10 / 16), (24, 0.5, 10 / 25), (59, 0.5, LEAST_WEIGHT)],
)
def test_a_long_answer_counts_most_where_it_is_decided(
    digits: int, first: float, inner: float, encoder: Encoder
) -> None:
    weights = answer_weights(encoder, "1" * digits)
    assert weights == pytest.approx([first] * 3 + [inner] * (digits - 3) + [1.0])


def test_rows_of_a_batch_are_their_examples(encoder: Encoder) -> None:
    random = Random(1)
    examples = [encoder.example(picture_tasks()["picture: place"](random)) for _ in range(3)]
    batch = encoder.batch(examples, 4, 96, 1)
    for row, example in enumerate(examples):
        length = len(example.ids)
        grids = [encoder.processor(picture).grid for picture in example.pictures]
        assert batch.ids[row, :length].tolist() == example.ids.tolist()
        assert not batch.weights[row, length:].any()
        expected = rope_positions(example.ids, grids, encoder.config, Switches())[0]
        assert np.array_equal(batch.positions[:, row, :length], expected)
    assert not batch.weights[3].any()


def test_placeholders_point_at_their_own_picture(encoder: Encoder) -> None:
    random = Random(2)
    examples = [encoder.example(picture_tasks()["picture: describe"](random)) for _ in range(3)]
    batch = encoder.batch(examples, 3, 96, 1)
    per_picture = MOST_PATCHES // encoder.config.vision.merge**2
    assert np.array_equal(batch.visual_index >= 0, batch.ids == encoder.config.image_token)
    for row, example in enumerate(examples):
        (picture,) = map(encoder.processor, example.pictures)
        assert np.array_equal(batch.pictures.patches[row, : len(picture.patches)], picture.patches)
        rows = batch.visual_index[row][batch.visual_index[row] >= 0]
        assert rows.tolist() == list(range(row * per_picture, row * per_picture + picture.tokens(2)))


def lone_shape(kind: str, colour: str, x: float, y: float, size: tuple[int, int]) -> Scene:
    return Scene(*size, (255, 255, 255), (Shape(kind, colour, x, y, 0.15),))


SCENES = [
    lone_shape("square", "red", 0.3, 0.8, (128, 128)),
    lone_shape("circle", "green", 0.85, 0.2, (300, 200)),
    lone_shape("square", "purple", 0.2, 0.85, (96, 128)),
]


@pytest.mark.parametrize("drawn", SCENES)
def test_the_token_that_tells_of_a_shape_shows_it(drawn: Scene, encoder: Encoder) -> None:
    pictures = encoder.pictures([drawn])
    (shape,) = drawn.shapes
    ((token, label),) = [(token, cell) for token, cell in enumerate(pictures.cells[0].tolist()) if cell[0] > 0]
    assert label[:2] == [1 + SHAPES.index(shape.kind), 1 + list(COLOURS).index(shape.colour)]
    patches = pictures.patches[0].reshape(-1, 4, 3, 2, 16, 16)[token]
    pixels = patches[:, :, 0].transpose(0, 2, 3, 1).reshape(-1, 3)
    colour = np.array(COLOURS[shape.colour]) / 127.5 - 1
    assert (np.abs(pixels - colour).max(axis=1) < 0.01).mean() > 0.2
    rows, columns, *_ = (place[0].reshape(-1, 4, *place.shape[2:]) for place in pictures.layout)
    assert rows[token, 0] // 2 == int(shape.y * (rows.max() + 1) / 2)
    assert columns[token, 0] // 2 == int(shape.x * (columns.max() + 1) / 2)


def test_pictures_are_padded_to_one_shape(encoder: Encoder) -> None:
    pictures = encoder.pictures(SCENES)
    most = MOST_PATCHES // encoder.config.vision.merge**2
    assert pictures.patches.shape == (len(SCENES), MOST_PATCHES, encoder.config.vision.patch_values)
    assert [place.shape[:2] for place in pictures.layout] == [(len(SCENES), MOST_PATCHES)] * 5
    assert pictures.cells.shape == (len(SCENES), most, 3)
    for index, drawn in enumerate(SCENES):
        size = len(encoder.processor(drawn.draw()).patches)
        assert pictures.layout[4][index].tolist() == [True] * size + [False] * (MOST_PATCHES - size)
        assert (pictures.cells[index, : size // 4] >= 0).all()
        assert (pictures.cells[index, size // 4 :] == -1).all()
        assert not pictures.patches[index, size:].any()
    assert {len(encoder.processor(drawn.draw()).patches) for drawn in SCENES} != {MOST_PATCHES}  # some are padded


def test_a_missing_row_has_an_empty_picture(encoder: Encoder) -> None:
    example = encoder.example(picture_tasks()["picture: describe"](Random(3)))
    pictures = encoder.batch([example], 2, 96, 1).pictures
    assert len(pictures.patches) == 2
    assert not pictures.patches[1].any()
    assert (pictures.cells[1] == -1).all()
    assert pictures.layout[4][1].tolist() == [True] + [False] * (MOST_PATCHES - 1)


def test_batches_are_trees_of_their_arrays(encoder: Encoder) -> None:
    text = encoder.batch([encoder.example(counting(Random(1)))], 2, 160, 0)
    assert text.pictures is text.visual_index is None
    assert [leaf.shape for leaf in jax.tree.leaves(text)] == [(2, 160), (2, 160), (3, 2, 160)]
    seen = encoder.batch([encoder.example(picture_tasks()["picture: number"](Random(1)))], 1, 96, 1)
    doubled = jax.tree.map(lambda leaf: leaf + leaf, seen)
    assert isinstance(doubled.pictures, Pictures)
    assert np.array_equal(doubled.pictures.patches, 2 * seen.pictures.patches)
    assert len(jax.tree.leaves(seen)) == 4 + len(jax.tree.leaves(seen.pictures)) == 4 + 7


def test_same_seed_same_pictures(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_data, "PICTURES_PER_BATCH", 5)
    one, same, other = (list(islice(picture_batches(encoder, seed), 2)) for seed in ("a", "a", "b"))
    for first, second in zip(one, same, strict=True):
        jax.tree.map(np.testing.assert_array_equal, first, second)
    assert len({batch.patches.tobytes() for batch in one + other}) == 4
    assert [len(batch.cells) for batch in one] == [5, 5]


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


def test_pictures_of_a_batch_of_conversations_are_told_like_pictures_alone(encoder: Encoder) -> None:
    drawn = scene(Random(9), place_clear=True)
    question = {"type": "text", "text": "What is in this picture?"}
    messages = [{"role": "user", "content": [{"type": "image", "image": drawn.draw()}, question]}]
    example = encoder.example([*messages, {"role": "assistant", "content": "A circle."}])
    jax.tree.map(np.testing.assert_array_equal, encoder.batch([example], 1, 96, 1).pictures, encoder.pictures([drawn]))


def test_evaluation_counts_what_was_asked_for(encoder: Encoder) -> None:
    batches = list(evaluation_batches(encoder, counting, 30, "count"))
    assert sum(rows for _, rows in batches) == 30
    assert all((batch.weights[:rows] > 0).any(axis=1).all() for batch, rows in batches)


def test_nothing_is_too_long_to_be_trained_on_often(encoder: Encoder) -> None:
    random = Random(6)
    for name, task in ALL_TASKS.items():
        fitting = [shape_of(encoder.example(task(random))) is not None for _ in range(20)]
        assert np.mean(fitting) > 0.8, name
