"""The picture tasks: the shapes are found again in the pixels, and every answer is worked out from what was found."""

import re
from collections import Counter
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from PIL import Image

from experiments.tiny_drills import drills
from experiments.tiny_pictures import (
    COLOURS,
    COLOURS_ZH,
    EXAMPLE,
    NUMBERS,
    PLACES,
    SHAPES,
    SHAPES_ZH,
    Scene,
    Shape,
    cell_words,
    cells,
    describe,
    describe_zh,
    picture_tasks,
    scene,
    second_turn,
)
from experiments.tiny_tasks import Message, held_out

NAMED_PLACES = [place for row in PLACES for place in row]
WHITE = (255, 255, 255)


@dataclass(frozen=True)
class Found:
    """A shape as the pixels show it: `field` is its cell of the 3 x 3 grid, row by row."""

    kind: str
    colour: str
    field: int


def find_shapes(image: Image.Image) -> list[Found]:
    """Connected areas of each exact colour; the kind follows from how much of its box an area fills."""
    step = max(1, min(image.size) // 100)
    pixels = np.asarray(image)[::step, ::step]
    found = []
    for colour, value in COLOURS.items():
        mask = (pixels == value).all(axis=2)
        while mask.any():
            area = connected_area(mask)
            mask &= ~area
            if area.sum() > 20:
                found.append(found_shape(area, colour))
    return found


def connected_area(mask: np.ndarray) -> np.ndarray:
    """The area of `mask` that holds its first pixel."""
    area = np.zeros_like(mask)
    area[np.unravel_index(mask.argmax(), mask.shape)] = True
    size = 0
    while area.sum() > size:
        size = area.sum()
        for _ in range(8):
            spread = area.copy()
            spread[1:] |= area[:-1]
            spread[:-1] |= area[1:]
            spread[:, 1:] |= area[:, :-1]
            spread[:, :-1] |= area[:, 1:]
            area = spread & mask
    return area


def found_shape(area: np.ndarray, colour: str) -> Found:
    rows, columns = np.nonzero(area)
    box = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
    filled = area.sum() / box
    kind = "square" if filled > 0.9 else "circle" if filled > 0.68 else "triangle"
    row, column = (
        int((side.min() + side.max() + 1) / 2 / length * 3)
        for side, length in zip((rows, columns), area.shape, strict=True)
    )
    return Found(kind, colour, row * 3 + column)


def asked(messages: list[Message]) -> tuple[str, str, Image.Image]:
    """The last question, its answer, and the picture of a conversation."""
    content = messages[-2]["content"]
    parts = next(message["content"] for message in messages if isinstance(message["content"], list))
    return content if isinstance(content, str) else content[1]["text"], messages[-1]["content"], parts[0]["image"]


def english(task: str, count: int = 12) -> list[tuple[str, str, list[Found]]]:
    """English questions of a task, with their answers and what is found in the pixels of their pictures."""
    random, rows = Random(task), []
    while len(rows) < count:
        question, answer, image = asked(picture_tasks()[task](random))
        if question.isascii():
            rows.append((question, answer, find_shapes(image)))
    return rows


def in_words(shapes: list[Found]) -> Counter:
    """How often each "red circle" is there."""
    return Counter(f"{shape.colour} {shape.kind}" for shape in shapes)


def described(text: str) -> Counter:
    """The same, out of a description in English."""
    parts = re.split(r", | and ", text.rstrip(".").lower())
    return Counter({part.split(" ", 1)[1].removesuffix("s"): count_of(part.split()[0]) for part in parts})


def count_of(word: str) -> int:
    return 1 if word == "a" else NUMBERS.index(word)


def test_the_documented_picture() -> None:
    assert describe(EXAMPLE) == "A red circle and two blue squares."
    assert describe_zh(EXAMPLE) == "一个红色圆形和两个蓝色正方形。"
    assert in_words(find_shapes(EXAMPLE.draw())) == {"red circle": 1, "blue square": 2}


def test_same_seed_same_picture() -> None:
    one, other = (scene(Random(4), place_clear=False).draw() for _ in range(2))
    assert np.array_equal(one, other)
    assert one.info["spec"] == other.info["spec"]


def test_shapes_lie_apart_and_in_sight() -> None:
    random = Random(6)
    for _ in range(60):
        drawn = scene(random, place_clear=random.random() < 0.5)
        assert 1 <= len(drawn.shapes) <= 3
        for index, one in enumerate(drawn.shapes):
            assert 0.7 * one.radius < min(one.x, one.y, 1 - one.x, 1 - one.y)  # the edge cuts off very little
            for other in drawn.shapes[:index]:
                distance = np.hypot((one.x - other.x) * drawn.width, (one.y - other.y) * drawn.height)
                assert distance > (one.radius + other.radius) * min(drawn.width, drawn.height)


def test_descriptions_match_the_pixels() -> None:
    for _, answer, shapes in english("picture: describe", 25):
        assert described(answer) == in_words(shapes)


def test_numbers_match_the_pixels() -> None:
    for question, answer, shapes in english("picture: number"):
        kind = re.search("|".join([*SHAPES, "shape"]), question)[0]
        count = sum(kind in (shape.kind, "shape") for shape in shapes)
        assert count_of(re.match(r"There (?:is|are) (\w+) ", answer)[1]) == count


def test_colours_match_the_pixels() -> None:
    for question, answer, shapes in english("picture: colour"):
        kind = re.search("|".join(SHAPES), question)[0]
        (colour,) = (shape.colour for shape in shapes if shape.kind == kind)
        assert answer == f"The {kind} is {colour}."


def place_answer(question: str, shapes: list[Found]) -> str:
    """The answer to an English question for the place of a shape."""
    name = re.search(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})", question)
    (field,) = (shape.field for shape in shapes if (shape.colour, shape.kind) == name.groups())
    return f"The {name[0]} is {NAMED_PLACES[field]}."


def test_places_match_the_pixels() -> None:
    for question, answer, shapes in english("picture: place"):
        assert answer == place_answer(question, shapes)


def test_the_drill_of_places_asks_for_every_shape_that_is_alone() -> None:
    random = Random(8)
    for _ in range(12):
        messages = drills(True)["drill: places"](random)
        shapes = find_shapes(asked(messages)[2])
        assert len(messages) == 2 * sum(number == 1 for number in in_words(shapes).values())
        for end in range(2, len(messages) + 1, 2):
            question, answer, _ = asked(messages[:end])
            assert not question.isascii() or answer == place_answer(question, shapes)


def test_yes_and_no_match_the_pixels() -> None:
    answers = Counter()
    for question, answer, shapes in english("picture: yes or no", 120):
        name = re.search(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})", question)[0]
        assert answer.startswith("Yes" if in_words(shapes)[name] else "No")
        answers[answer[:2]] += 1
    assert min(answers.values()) > 15


def test_second_turn_asks_about_the_first_turns_picture() -> None:
    random = Random(8)
    for _ in range(10):
        first, description, second, answer = second_turn(random)
        assert first["content"][0]["type"] == "image"
        assert isinstance(second["content"], str)
        spec = first["content"][0]["image"].info["spec"]
        assert description["content"] in (describe(spec), describe_zh(spec))
        assert answer["content"] != description["content"]


def test_chinese_descriptions_name_the_same_shapes() -> None:
    random = Random(9)
    for _ in range(30):
        drawn = scene(random, place_clear=False)
        for shape in drawn.shapes:
            assert COLOURS_ZH[shape.colour] + SHAPES_ZH[shape.kind] in describe_zh(drawn)
            assert f"{shape.colour} {shape.kind}" in describe(drawn).lower()


def told(grid: list[tuple[int, int, int]]) -> dict[int, tuple[int, int, int]]:
    """The cells that tell of a shape, by number."""
    return {index: cell for index, cell in enumerate(grid) if cell[:2] != (0, 0)}


def test_only_the_cell_with_the_centre_tells_of_a_shape() -> None:
    wide = Scene(200, 200, WHITE, (Shape("triangle", "black", 0.6, 0.4, 0.24),))
    assert told(cells(wide, 5, 5)) == {2 * 5 + 3: (3, 5, 5)}


@pytest.mark.parametrize(
    ("x", "y", "cell", "place"),
    [(0.0, 0.0, 0, 1), (1.0, 1.0, 15, 9), (1.0, 0.0, 3, 3), (0.0, 1.0, 12, 7), (0.5, 0.25, 6, 2), (0.49, 0.24, 1, 2)],
)
def test_centres_on_edges_belong_to_one_cell(x: float, y: float, cell: int, place: int) -> None:
    scene = Scene(200, 200, WHITE, (Shape("circle", "red", x, y, 0.1),))
    assert told(cells(scene, 4, 4)) == {cell: (1, 1, place)}


def test_the_ground_tells_nothing() -> None:
    assert cells(Scene(200, 200, WHITE, ()), 4, 4) == [(0, 0, 0)] * 16


def test_a_shape_gives_its_own_place() -> None:
    left = Scene(200, 200, WHITE, (Shape("square", "blue", 0.3, 0.1, 0.1),))
    assert cells(left, 4, 4)[1] == (2, 2, 1)  # the cell's own centre lies in the middle column


@pytest.mark.parametrize(("rows", "columns", "size"), [(4, 6, (300, 200)), (5, 4, (96, 128)), (2, 8, (320, 80))])
def test_cells_of_pictures_that_are_no_squares(rows: int, columns: int, size: tuple[int, int]) -> None:
    drawn = Scene(*size, WHITE, (Shape("square", "green", 0.9, 0.2, 0.1), Shape("circle", "purple", 0.1, 0.9, 0.1)))
    grid = cells(drawn, rows, columns)
    assert len(grid) == rows * columns
    assert told(grid) == {int(0.2 * rows) * columns + columns - 1: (2, 3, 3), (rows - 1) * columns: (1, 6, 7)}
    assert grid[0] == grid[-1] == (0, 0, 0)


def test_cells_match_the_pixels() -> None:
    random = Random(10)
    for _ in range(20):
        drawn = scene(random, place_clear=True)
        found = [
            (1 + SHAPES.index(shape.kind), 1 + list(COLOURS).index(shape.colour), 1 + shape.field)
            for shape in find_shapes(drawn.draw())
        ]
        assert sorted(told(cells(drawn, 6, 6)).values()) == sorted(found)


def test_cell_words_are_those_of_the_answers() -> None:
    kinds, colours, places = cell_words()
    assert kinds == (" circle圆形", " square正方形", " triangle三角形")
    assert colours[0] == " red红色"
    assert len(colours) == len(COLOURS)
    assert places[:2] == (" top left左上角", " top上方")
    assert places[8] == " bottom right右下角"
    assert len(set(places)) == 9
    for place, named in zip(places, NAMED_PLACES, strict=True):
        assert named.endswith(re.match(r"[a-z ]+", place)[0])


@pytest.mark.parametrize("task", picture_tasks())
def test_conversation_form(task: str) -> None:
    messages = picture_tasks()[task](Random(1))
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
    has_picture = any(isinstance(message["content"], list) for message in messages)
    assert has_picture == (task != "picture: missing")


def test_pictures_count_when_holding_out() -> None:
    def question(image: Image.Image) -> list[Message]:
        content = [{"type": "image", "image": image}, {"type": "text", "text": "What is in this picture?"}]
        return [{"role": "user", "content": content}, {"role": "assistant", "content": ""}]

    random = Random(3)
    held = {held_out(question(scene(random, place_clear=False).draw())) for _ in range(100)}
    assert held == {True, False}
    assert len({held_out(question(scene(Random(3), place_clear=False).draw())) for _ in range(2)}) == 1
