"""Drawn pictures of a few coloured shapes, and what can be asked about them.

    python -m experiments.tiny_pictures shapes.png

draws the picture that the examples of README.md ask about.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any

from PIL import Image, ImageDraw

from experiments.tiny_tasks import Message, Task, assistant, vary

COLOURS = {
    "red": (220, 40, 40),
    "blue": (40, 70, 220),
    "green": (40, 160, 60),
    "yellow": (240, 210, 40),
    "black": (20, 20, 20),
    "purple": (140, 50, 170),
}
SHAPES = ("circle", "square", "triangle")
BACKGROUNDS = ((255, 255, 255), (255, 255, 255), (240, 240, 240), (225, 235, 245), (250, 245, 225), (205, 205, 205))
PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the centre", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
PLACES_ZH = (("左上角", "上方", "右上角"), ("左边", "中间", "右边"), ("左下角", "下方", "右下角"))
COLOURS_ZH = dict(zip(COLOURS, ("红色", "蓝色", "绿色", "黄色", "黑色", "紫色"), strict=True))
SHAPES_ZH = dict(zip(SHAPES, ("圆形", "正方形", "三角形"), strict=True))
NUMBERS = ("no", "one", "two", "three")
NUMBERS_ZH = ("零", "一", "两", "三")
MOST_SHAPES = 3


@dataclass(frozen=True)
class Shape:
    """One shape: its centre and radius as shares of the picture's sides (radius of the shorter one)."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def place(self) -> tuple[int, int]:
        """Row and column of the 3 x 3 field that holds the centre."""
        return min(int(self.y * 3), 2), min(int(self.x * 3), 2)


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn."""

    width: int
    height: int
    background: tuple[int, int, int]
    shapes: tuple[Shape, ...]

    def draw(self) -> Image.Image:
        """The picture; `info["spec"]` holds the scene, by which held-out pictures are told."""
        scale = 2  # drawn larger and reduced, so that edges are smooth
        image = Image.new("RGB", (self.width * scale, self.height * scale), self.background)
        canvas = ImageDraw.Draw(image)
        for shape in self.shapes:
            _draw_shape(canvas, shape, self.width * scale, self.height * scale)
        image = image.resize((self.width, self.height), Image.Resampling.BOX)
        image.info["spec"] = self
        return image


EXAMPLE = Scene(
    200,
    200,
    BACKGROUNDS[0],
    (
        Shape("square", "blue", 0.2, 0.8, 0.1),
        Shape("circle", "red", 0.5, 0.3, 0.15),
        Shape("square", "blue", 0.8, 0.8, 0.1),
    ),
)


def _draw_shape(canvas: ImageDraw.ImageDraw, shape: Shape, width: int, height: int) -> None:
    x, y, r = shape.x * width, shape.y * height, shape.radius * min(width, height)
    colour = COLOURS[shape.colour]
    if shape.kind == "circle":
        canvas.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape.kind == "square":
        side = r * 0.88
        canvas.rectangle((x - side, y - side, x + side, y + side), fill=colour)
    else:
        canvas.polygon([(x, y - r), (x + r * 0.95, y + r * 0.75), (x - r * 0.95, y + r * 0.75)], fill=colour)


def scene(random: Random, *, place_clear: bool) -> Scene:
    """A random scene without overlaps; with `place_clear` every centre lies well inside a field of the 3 x 3 grid."""
    side = random.choice((96, 128, 160, 200, 256, 320))
    width, height = random.choice(((1, 1), (1, 1), (1, 1), (4, 3), (3, 4), (3, 2)))
    width, height = side * width // max(min(width, height), 1), side * height // max(min(width, height), 1)
    shapes: list[Shape] = []
    count = random.randint(1, MOST_SHAPES)
    for _ in range(200):
        if len(shapes) == count:
            break
        candidate = _shape(random, shapes, place_clear)
        if not any(_overlap(candidate, other, width, height) for other in shapes):
            shapes.append(candidate)
    return Scene(width, height, random.choice(BACKGROUNDS), tuple(shapes))


def crowded_scene(random: Random, *, place_clear: bool) -> Scene:
    """A scene of the most shapes that a picture can hold, not all alike: the ones whose groups are easily mixed up."""
    while True:
        drawn = scene(random, place_clear=place_clear)
        if len(drawn.shapes) == MOST_SHAPES and len(groups(drawn.shapes)) > 1:
            return drawn


def _shape(random: Random, others: list[Shape], place_clear: bool) -> Shape:
    if others and random.random() < 0.4:  # often one more of the same, so that counting matters
        kind, colour = others[-1].kind, others[-1].colour
    else:
        kind, colour = random.choice(SHAPES), random.choice(tuple(COLOURS))
    if place_clear:
        x, y = ((random.randrange(3) + random.uniform(0.35, 0.65)) / 3 for _ in range(2))
        return Shape(kind, colour, x, y, random.uniform(0.12, 0.16))
    radius = random.uniform(0.12, 0.24)
    x, y = (random.uniform(radius, 1 - radius) for _ in range(2))
    return Shape(kind, colour, x, y, radius)


def _overlap(one: Shape, other: Shape, width: int, height: int) -> bool:
    distance = math.hypot((one.x - other.x) * width, (one.y - other.y) * height)
    return distance < (one.radius + other.radius) * 1.1 * min(width, height)


def cells(scene: Scene, rows: int, columns: int) -> list[tuple[int, int, int]]:
    """What a grid over the picture shows, row by row: per cell the numbers, each from 1, of the kind, colour and
    place (a field of 3 x 3, row by row) of the shape that has its centre there; 0, 0, 0 where there is none."""
    found = [(0, 0, 0)] * (rows * columns)
    for shape in scene.shapes:
        down, across = shape.place
        cell = min(int(shape.y * rows), rows - 1) * columns + min(int(shape.x * columns), columns - 1)
        kind, colour = SHAPES.index(shape.kind), list(COLOURS).index(shape.colour)
        found[cell] = (1 + kind, 1 + colour, 1 + down * 3 + across)
    return found


def cell_words() -> tuple[tuple[str, ...], ...]:
    """The words, English and Chinese together, for the kinds, colours and places that `cells` numbers."""
    places = zip((place for row in PLACES for place in row), (place for row in PLACES_ZH for place in row), strict=True)
    return (
        tuple(f" {kind}{SHAPES_ZH[kind]}" for kind in SHAPES),
        tuple(f" {colour}{COLOURS_ZH[colour]}" for colour in COLOURS),
        tuple(english.split("the")[1] + chinese for english, chinese in places),
    )


# Words for a scene


def groups(shapes: tuple[Shape, ...]) -> list[tuple[str, str, int]]:
    """(colour, kind, count), in the fixed order of kinds, then colours."""
    counted = Counter((SHAPES.index(shape.kind), list(COLOURS).index(shape.colour)) for shape in shapes)
    return [(list(COLOURS)[colour], SHAPES[kind], count) for (kind, colour), count in sorted(counted.items())]


def named(colour: str, kind: str, count: int) -> str:
    """ "a red circle", "two blue squares"."""
    if count > 1:
        return f"{NUMBERS[count]} {colour} {kind}s"
    return f"a {colour} {kind}"


def describe(scene: Scene) -> str:
    """ "A red circle and two blue squares.\""""
    parts = [named(*group) for group in groups(scene.shapes)]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return text[0].upper() + text[1:] + "."


def describe_zh(scene: Scene) -> str:
    """The same in Chinese."""
    parts = [
        f"{NUMBERS_ZH[count]}个{COLOURS_ZH[colour]}{SHAPES_ZH[kind]}" for colour, kind, count in groups(scene.shapes)
    ]
    text = parts[0] if len(parts) == 1 else "、".join(parts[:-1]) + "和" + parts[-1]
    return f"{text}。"


ASK_WHAT = (
    "What is in this picture?",
    "What is in the picture?",
    "What's in this image?",
    "What do you see?",
    "What can you see in this picture?",
    "Describe this picture.",
    "Describe the image.",
    "Please describe the picture.",
    "What does this picture show?",
    "Which shapes are in the picture?",
)
ASK_WHAT_ZH = (
    "图里有什么？",
    "这张图片里有什么？",
    "图中有什么？",
    "请描述这张图片。",
    "描述一下图片。",
    "你看到了什么？",
)


def ask_what(random: Random, scene: Scene) -> tuple[str, str]:
    """A description of everything."""
    if random.random() < 0.35:
        return random.choice(ASK_WHAT_ZH), describe_zh(scene)
    return random.choice(ASK_WHAT), describe(scene)


def ask_how_many(random: Random, scene: Scene) -> tuple[str, str]:
    """The number of shapes of one kind, or of all."""
    chinese = random.random() < 0.35
    if random.random() < 0.25:
        count = len(scene.shapes)
        if chinese:
            return random.choice(("一共有几个图形？", "图里有几个图形？")), f"有{NUMBERS_ZH[count]}个图形。"
        question = random.choice(("How many shapes are there?", "How many shapes do you see?"))
        return question, "There is one shape." if count == 1 else f"There are {NUMBERS[count]} shapes."
    kind = random.choice((random.choice(SHAPES), random.choice(scene.shapes).kind))
    count = sum(shape.kind == kind for shape in scene.shapes)
    if chinese:
        question = random.choice(("有几个{k}？", "图里有几个{k}？", "一共有多少个{k}？")).format(k=SHAPES_ZH[kind])
        return question, f"有{NUMBERS_ZH[count]}个{SHAPES_ZH[kind]}。" if count else f"没有{SHAPES_ZH[kind]}。"
    question = random.choice(("How many {k}s are there?", "How many {k}s do you see?", "Count the {k}s.")).format(
        k=kind
    )
    return question, f"There is one {kind}." if count == 1 else f"There are {NUMBERS[count]} {kind}s."


def ask_colour(random: Random, scene: Scene) -> tuple[str, str] | None:
    """The colour of a kind that occurs once."""
    single = [shape for shape in scene.shapes if sum(other.kind == shape.kind for other in scene.shapes) == 1]
    if not single:
        return None
    shape = random.choice(single)
    if random.random() < 0.35:
        name = SHAPES_ZH[shape.kind]
        return random.choice(
            (f"{name}是什么颜色？", f"{name}是什么颜色的？")
        ), f"{name}是{COLOURS_ZH[shape.colour]}的。"
    question = random.choice(("What colour is the {k}?", "What color is the {k}?", "Which colour does the {k} have?"))
    return question.format(k=shape.kind), f"The {shape.kind} is {shape.colour}."


def alone(scene: Scene) -> list[Shape]:
    """The shapes that are alone in their kind and colour."""
    counted = Counter((shape.kind, shape.colour) for shape in scene.shapes)
    return [shape for shape in scene.shapes if counted[shape.kind, shape.colour] == 1]


def ask_where(random: Random, scene: Scene) -> tuple[str, str] | None:
    """The place of a shape that is alone in its kind and colour."""
    single = alone(scene)
    return where_is(random, random.choice(single)) if single else None


def where_is(random: Random, shape: Shape) -> tuple[str, str]:
    """The place of this shape."""
    row, column = shape.place
    if random.random() < 0.35:
        name = COLOURS_ZH[shape.colour] + SHAPES_ZH[shape.kind]
        return random.choice((f"{name}在哪里？", f"{name}在什么位置？")), f"{name}在{PLACES_ZH[row][column]}。"
    name = f"{shape.colour} {shape.kind}"
    return random.choice(
        (f"Where is the {name}?", f"Where do you see the {name}?")
    ), f"The {name} is {PLACES[row][column]}."


def ask_whether(random: Random, scene: Scene) -> tuple[str, str]:
    """Whether a shape of this kind and colour is there."""
    if random.random() < 0.5:
        shape = random.choice(scene.shapes)
        kind, colour = shape.kind, shape.colour
    else:  # often a wrong pairing of what is there
        kind = random.choice((random.choice(scene.shapes).kind, random.choice(SHAPES)))
        colour = random.choice((random.choice(scene.shapes).colour, random.choice(tuple(COLOURS))))
    there = any((shape.kind, shape.colour) == (kind, colour) for shape in scene.shapes)
    if random.random() < 0.35:
        name = COLOURS_ZH[colour] + SHAPES_ZH[kind]
        return f"有{name}吗？", f"有，有{name}。" if there else f"没有，没有{name}。"
    name = named(colour, kind, 1)
    question = random.choice((f"Is there {name}?", f"Do you see {name}?"))
    return question, f"Yes, there is {name}." if there else f"No, there is no {colour} {kind}."


def show(image: Image.Image, text: str) -> Message:
    """A user turn with a picture before its question."""
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}


def _about_one(ask: Any, *, place_clear: bool = False) -> Task:
    def make(random: Random) -> list[Message]:
        while True:
            drawn = scene(random, place_clear=place_clear or random.random() < 0.5)
            asked = ask(random, drawn)
            if asked is not None:
                return [show(drawn.draw(), vary(random, asked[0])), assistant(asked[1])]

    return make


def second_turn(random: Random) -> list[Message]:
    """A question about the picture of the first turn, in the second."""
    drawn = scene(random, place_clear=True)
    question, answer = ask_what(random, drawn)
    again = None
    while again is None:
        again = random.choice((ask_how_many, ask_colour, ask_where, ask_whether))(random, drawn)
    return [
        show(drawn.draw(), vary(random, question)),
        assistant(answer),
        {"role": "user", "content": vary(random, again[0])},
        assistant(again[1]),
    ]


def missing(random: Random) -> list[Message]:
    """A question about a picture where there is none."""
    if random.random() < 0.35:
        return [{"role": "user", "content": vary(random, random.choice(ASK_WHAT_ZH))}, assistant("这里没有图片。")]
    return [{"role": "user", "content": vary(random, random.choice(ASK_WHAT))}, assistant("There is no picture here.")]


def picture_tasks() -> dict[str, Task]:
    """The tasks by name."""
    return {
        "picture: describe": _about_one(ask_what),
        "picture: number": _about_one(ask_how_many),
        "picture: colour": _about_one(ask_colour),
        "picture: place": _about_one(ask_where, place_clear=True),
        "picture: yes or no": _about_one(ask_whether),
        "picture: second turn": second_turn,
        "picture: missing": missing,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m experiments.tiny_pictures", description="Draws the picture that README's examples ask about."
    )
    parser.add_argument("file", help="such as shapes.png")
    file = parser.parse_args().file
    try:
        EXAMPLE.draw().save(file)
    except (ValueError, OSError) as error:  # a kind of file that Pillow does not know, or a folder that is not there
        parser.error(f"cannot write {file}: {error}")
