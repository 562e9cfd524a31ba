"""Conversations as training batches: token ids, loss weights, positions and pictures, in a few fixed shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

import numpy as np
from tokenizers import Tokenizer

from experiments.tiny_pictures import cells
from experiments.tiny_tasks import Message, Task, held_out, with_system
from models.config import ModelConfig
from models.images import ImageProcessor, VisionInput
from models.positions import rope_positions
from models.switches import Switches
from models.vision import patch_layout

TOKENS_PER_BATCH = 1536
TEXT_LENGTHS = (32, 64, 96, 160)
PICTURE_LENGTHS = (64, 96, 176)
LEAST_WEIGHT = 0.3  # of a token of a long answer
MOST_PATCHES = 100  # of a picture after the small models' own preprocessing


@dataclass(frozen=True)
class Example:
    """One conversation: ids `[length]`, the weight of predicting each next token `[length]`, its pictures, and what
    lies under each visual token of theirs."""

    ids: np.ndarray
    weights: np.ndarray
    pictures: tuple[VisionInput, ...]
    cells: tuple[list[int], ...]


@dataclass(frozen=True)
class Batch:
    """Examples padded to one shape. `patches` and its layout are `[pictures, patches, ...]`; `visual_index`
    `[rows, length]` gives each placeholder's row among all visual tokens of the batch, -1 for text; `cells` and
    `places` `[pictures, tokens]` tell what lies under each visual token and in which ninth of the picture it is, -1 for
    padding. None without pictures."""

    ids: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    patches: np.ndarray | None
    layout: tuple[np.ndarray, ...] | None
    visual_index: np.ndarray | None
    cells: np.ndarray | None
    places: np.ndarray | None


class Encoder:
    """Turns conversations into examples and examples into batches, for one model."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, processor: ImageProcessor | None) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.processor = processor

    def example(self, messages: list[Message]) -> Example:
        """The loss counts what the assistant says, long answers with the root of their length. Where an answer is
        decided, at its first tokens and at its end, a token weighs more."""
        ids: list[int] = []
        weights: list[float] = []
        pictures: list[VisionInput] = []
        seen: list[list[int]] = []
        for message in messages:
            head = self._encode(f"<|im_start|>{message['role']}\n")
            body = self._body(message, pictures, seen)
            said = message["role"] == "assistant"
            inner = max(len(body) ** -0.5, LEAST_WEIGHT)
            tail = self._encode("\n")
            ids += head + body + tail
            answer = [max(inner, 0.5)] * 3 + [inner] * (len(body) - 4) + [1.0]
            weights += [0.0] * len(head) + (answer[-len(body) :] if said else [0.0] * len(body)) + [0.0] * len(tail)
        # Position i is trained to predict token i + 1.
        return Example(
            np.array(ids[:-1], np.int32), np.array([*weights[1:-1], 0.0], np.float32), tuple(pictures), tuple(seen)
        )

    def _body(self, message: Message, pictures: list[VisionInput], seen: list[list[int]]) -> list[int]:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = ""
        for part in parts:
            if part["type"] == "text":
                text += part["text"]
            else:
                pictures.append(self.processor(part["image"]))
                pads = pictures[-1].tokens(self.config.vision.merge)
                seen.append(cells(part["image"].info["spec"], *self._token_grid(pictures[-1])))
                text += f"<|vision_start|>{'<|image_pad|>' * pads}<|vision_end|>"
        return self._encode(f"{text}<|im_end|>")

    def _token_grid(self, picture: VisionInput) -> tuple[int, int]:
        """Rows and columns of visual tokens."""
        return picture.grid[1] // self.config.vision.merge, picture.grid[2] // self.config.vision.merge

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def batch(self, examples: list[Example], rows: int, length: int, pictures_per_row: int) -> Batch:
        """`rows` examples padded to `length` tokens; missing rows are empty."""
        ids, weights = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
        positions = np.zeros((3, rows, length), np.int32)
        for row, example in enumerate(examples):
            count = len(example.ids)
            ids[row, :count], weights[row, :count] = example.ids, example.weights
            grids = [picture.grid for picture in example.pictures]
            positions[:, row, :count] = rope_positions(example.ids, grids, self.config, Switches())[0]
        if pictures_per_row == 0:
            return Batch(ids, weights, positions, None, None, None, None, None)
        return Batch(ids, weights, positions, *self._pictures(examples, ids, rows * pictures_per_row))

    def _pictures(
        self, examples: list[Example], ids: np.ndarray, count: int
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...], np.ndarray, np.ndarray, np.ndarray]:
        vision = self.config.vision
        pictures = [picture for example in examples for picture in example.pictures]
        patches = np.zeros((count, MOST_PATCHES, vision.patch_values), np.float32)
        places = [
            np.zeros((count, MOST_PATCHES, *tail), dtype)
            for tail, dtype in (((), np.int32), ((), np.int32), ((4,), np.int32), ((4,), np.float32), ((), bool))
        ]
        places[4][:, 0] = True  # an empty picture still needs one patch to attend to
        tokens = []
        seen = [labels for example in examples for labels in example.cells]
        under, ninths = (np.full((count, MOST_PATCHES // vision.merge**2), -1, np.int32) for _ in range(2))
        for index, picture in enumerate(pictures):
            rows, columns = self._token_grid(picture)
            row, column = np.divmod(np.arange(rows * columns), columns)
            under[index, : rows * columns] = seen[index]
            ninths[index, : rows * columns] = (row + 0.5) * 3 // rows * 3 + (column + 0.5) * 3 // columns
            layout = patch_layout(picture.grid[1], picture.grid[2], vision.merge, vision.positions)
            size = len(picture.patches)
            patches[index, :size] = picture.patches
            for array, values in zip(
                places, (layout.rows, layout.columns, layout.table_index, layout.table_weight, True), strict=True
            ):
                array[index, :size] = values
            tokens += [index * MOST_PATCHES // vision.merge**2 + token for token in range(picture.tokens(vision.merge))]
        visual_index = np.full(ids.shape, -1, np.int32)
        visual_index[ids == self.config.image_token] = tokens
        return patches, tuple(places), visual_index, under, ninths


@dataclass(frozen=True)
class Shape:
    """The shape of a batch."""

    length: int
    pictures_per_row: int

    @property
    def rows(self) -> int:
        """Rows that make a batch of about `TOKENS_PER_BATCH` tokens."""
        return max(TOKENS_PER_BATCH // self.length, 1)


def shape_of(example: Example) -> Shape | None:
    """The smallest shape that holds the example; None if it is too long to be trained on."""
    lengths = PICTURE_LENGTHS if example.pictures else TEXT_LENGTHS
    length = next((length for length in lengths if length >= len(example.ids)), None)
    return None if length is None else Shape(length, len(example.pictures))


def conversations(
    tasks: Mapping[str, tuple[Task, float]], random: Random, *, evaluation: bool
) -> Iterator[list[Message]]:
    """Conversations of tasks drawn by weight; only held-out ones for evaluation, only the others for training."""
    makers, weights = zip(*tasks.values(), strict=True)
    while True:
        messages = with_system(random, random.choices(makers, weights)[0](random))
        if not evaluation:
            messages = before_held_out(messages)
        if messages and held_out(messages) == evaluation:
            yield messages


def before_held_out(messages: list[Message]) -> list[Message]:
    """The conversation up to, and without, the first turn that is held out for evaluation."""
    for end, message in enumerate(messages, 1):
        if message["role"] == "assistant" and held_out(messages[:end]):
            answers = [index for index in range(end - 1) if messages[index]["role"] == "assistant"]
            return messages[: answers[-1] + 1] if answers else []
    return messages


def training_batches(encoder: Encoder, tasks: Mapping[str, tuple[Task, float]], seed: str) -> Iterator[Batch]:
    """Endless batches: examples wait by shape until a batch of theirs is full."""
    waiting: dict[Shape, list[Example]] = {}
    for messages in conversations(tasks, Random(seed), evaluation=False):
        example = encoder.example(messages)
        shape = shape_of(example)
        if shape is None:
            continue
        held = waiting.setdefault(shape, [])
        held.append(example)
        if len(held) == shape.rows:
            yield encoder.batch(held, shape.rows, shape.length, shape.pictures_per_row)
            waiting[shape] = []


def evaluation_batches(encoder: Encoder, task: Task, count: int, seed: str) -> Iterator[tuple[Batch, int]]:
    """`count` held-out examples of one task in batches, each with its number of real rows."""
    source = conversations({"": (task, 1.0)}, Random(seed), evaluation=True)
    by_shape: dict[Shape, list[Example]] = {}
    taken = 0
    while taken < count:
        example = encoder.example(next(source))
        shape = shape_of(example)
        if shape is not None:
            by_shape.setdefault(shape, []).append(example)
            taken += 1
    for shape, examples in by_shape.items():
        for start in range(0, len(examples), shape.rows):
            rows = examples[start : start + shape.rows]
            yield encoder.batch(rows, shape.rows, shape.length, shape.pictures_per_row), len(rows)
