"""Conversations as training batches: token ids, loss weights, positions and pictures, in a few fixed shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random

import jax
import numpy as np
from PIL import Image
from tokenizers import Tokenizer

from experiments.tiny_pictures import Scene, cells, scene
from experiments.tiny_tasks import Message, Task, held_out, with_system
from models.config import ModelConfig
from models.images import ImageProcessor, VisionInput
from models.positions import rope_positions
from models.switches import Switches
from models.vision import patch_layout

TOKENS_PER_BATCH = 1536
TEXT_LENGTHS = (32, 64, 96, 160)
PICTURE_LENGTHS = (64, 96, 176)
PICTURES_PER_BATCH = 48  # where there is no text
FULL_WEIGHT = 10  # tokens of an answer whose every token counts fully
LEAST_WEIGHT = 0.3  # of a token of a long answer
MOST_PATCHES = 100  # of a picture after the small models' own preprocessing


@dataclass(frozen=True)
class Example:
    """One conversation: ids `[length]`, the weight of predicting each next token `[length]`, and its pictures."""

    ids: np.ndarray
    weights: np.ndarray
    pictures: tuple[Image.Image, ...]


@dataclass(frozen=True)
class Pictures:
    """Pictures padded to one shape: `patches` and its layout are `[pictures, patches, ...]`; `cells`
    `[pictures, tokens, 3]` tells kind, colour and place under each visual token (`tiny_pictures.cells`), -1 for
    padding."""

    patches: np.ndarray
    layout: tuple[np.ndarray, ...]
    cells: np.ndarray


@dataclass(frozen=True)
class Batch:
    """Examples padded to one shape: `ids` and `weights` `[rows, length]`, `positions` `[3, rows, length]`.
    `visual_index` `[rows, length]` gives each placeholder's row among all visual tokens of the batch, -1 for text.
    `pictures` and it are None without pictures."""

    ids: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    pictures: Pictures | None
    visual_index: np.ndarray | None


jax.tree_util.register_dataclass(Pictures)
jax.tree_util.register_dataclass(Batch)


class Encoder:
    """Turns conversations into examples and examples into batches, for one model."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, processor: ImageProcessor | None) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.processor = processor

    def example(self, messages: list[Message]) -> Example:
        """The loss counts what the assistant says, the tokens of long answers less, except where an answer is decided:
        at its first tokens and at its end."""
        ids: list[int] = []
        weights: list[float] = []
        pictures: list[Image.Image] = []
        for message in messages:
            head = self._encode(f"<|im_start|>{message['role']}\n")
            body = self._body(message, pictures)
            said = message["role"] == "assistant"
            inner = min(1.0, max(FULL_WEIGHT / len(body), LEAST_WEIGHT))
            tail = self._encode("\n")
            ids += head + body + tail
            answer = [max(inner, 0.5)] * 3 + [inner] * (len(body) - 4) + [1.0]
            weights += [0.0] * len(head) + (answer[-len(body) :] if said else [0.0] * len(body)) + [0.0] * len(tail)
        # Position i is trained to predict token i + 1.
        return Example(np.array(ids[:-1], np.int32), np.array([*weights[1:-1], 0.0], np.float32), tuple(pictures))

    def _body(self, message: Message, pictures: list[Image.Image]) -> list[int]:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        text = ""
        for part in parts:
            if part["type"] == "text":
                text += part["text"]
            else:
                pictures.append(part["image"])
                pads = self.processor(part["image"]).tokens(self.config.vision.merge)
                text += f"<|vision_start|>{'<|image_pad|>' * pads}<|vision_end|>"
        return self._encode(f"{text}<|im_end|>")

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def batch(self, examples: list[Example], rows: int, length: int, pictures_per_row: int) -> Batch:
        """`rows` examples padded to `length` tokens; missing rows are empty."""
        ids, weights = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.float32)
        positions = np.zeros((3, rows, length), np.int32)
        inputs: list[VisionInput] = []
        for row, example in enumerate(examples):
            count = len(example.ids)
            ids[row, :count], weights[row, :count] = example.ids, example.weights
            own = [self.processor(picture) for picture in example.pictures]
            grids = [picture.grid for picture in own]
            positions[:, row, :count] = rope_positions(example.ids, grids, self.config, Switches())[0]
            inputs += own
        if pictures_per_row == 0:
            return Batch(ids, weights, positions, None, None)
        scenes = [picture.info["spec"] for example in examples for picture in example.pictures]
        visual_index = np.full(ids.shape, -1, np.int32)
        visual_index[ids == self.config.image_token] = [
            index * self._most_tokens + token
            for index, picture in enumerate(inputs)
            for token in range(picture.tokens(self.config.vision.merge))
        ]
        pictures = self._pictures(inputs, scenes, rows * pictures_per_row)
        return Batch(ids, weights, positions, pictures, visual_index)

    def pictures(self, scenes: list[Scene]) -> Pictures:
        """Scenes alone, drawn."""
        return self._pictures([self.processor(drawn.draw()) for drawn in scenes], scenes, len(scenes))

    @property
    def _most_tokens(self) -> int:
        return MOST_PATCHES // self.config.vision.merge**2

    def _pictures(self, inputs: list[VisionInput], scenes: list[Scene], count: int) -> Pictures:
        """`count` pictures; missing ones are empty."""
        vision = self.config.vision
        patches = np.zeros((count, MOST_PATCHES, vision.patch_values), np.float32)
        layout = tuple(
            np.zeros((count, MOST_PATCHES, *tail), dtype)
            for tail, dtype in (((), np.int32), ((), np.int32), ((4,), np.int32), ((4,), np.float32), ((), bool))
        )
        layout[4][:, 0] = True  # an empty picture still needs one patch to attend to
        under = np.full((count, self._most_tokens, 3), -1, np.int32)
        for index, (picture, drawn) in enumerate(zip(inputs, scenes, strict=True)):
            _, height, width = picture.grid
            under[index, : picture.tokens(vision.merge)] = cells(drawn, height // vision.merge, width // vision.merge)
            own = patch_layout(height, width, vision.merge, vision.positions)
            size = len(picture.patches)
            patches[index, :size] = picture.patches
            for array, values in zip(
                layout, (own.rows, own.columns, own.table_index, own.table_weight, True), strict=True
            ):
                array[index, :size] = values
        return Pictures(patches, layout, under)


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


def picture_batches(encoder: Encoder, seed: str) -> Iterator[Pictures]:
    """Endless batches of pictures alone."""
    random = Random(seed)
    while True:
        yield encoder.pictures([scene(random, place_clear=random.random() < 0.5) for _ in range(PICTURES_PER_BATCH)])


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
