"""Conversations for training alone that ask several things about one text or picture.

Reading a paragraph or a picture costs more than answering: five answers from one reading teach about three times as
much per second as one. What is evaluated stays in `tiny_tasks` and `tiny_pictures`.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from experiments.tiny_pictures import (
    Scene,
    Shape,
    alone,
    ask_colour,
    ask_how_many,
    ask_what,
    ask_where,
    ask_whether,
    crowded_scene,
    scene,
    show,
    where_is,
)
from experiments.tiny_tasks import (
    ASK_CODE_EN,
    ASK_CODE_ZH,
    CODE_EN,
    CODE_ZH,
    FACTS_EN,
    FACTS_ZH,
    FRAMES_EN,
    FRAMES_ZH,
    NAMES,
    NAMES_ZH,
    SELF_EN,
    SELF_ZH,
    Message,
    Task,
    assistant,
    code_word,
    user,
    vary,
)

MOST_QUESTIONS = 5


def facts(random: Random) -> list[Message]:
    """A paragraph of facts, and a turn for each of several questions about it."""
    chinese = random.random() < 0.35
    known, names = (FACTS_ZH, NAMES_ZH) if chinese else (FACTS_EN, NAMES)
    pairs = [(kind, name) for kind in known for name in random.sample(names, 3)]
    told, asked = [], []
    for kind, name in random.sample(pairs, random.randint(2, 5)):
        fact, question, answer, values = known[kind]
        value = random.choice(values)
        told.append(fact.format(n=name, v=value))
        asked.append((question.format(n=name), answer.format(n=name, v=value)))
    if random.random() < 0.5:
        code = code_word(random)
        told.insert(random.randrange(len(told) + 1), random.choice(CODE_ZH if chinese else CODE_EN).format(v=code))
        answer = f"暗号是{code}。" if chinese else f"The code word is {code}."
        asked.append((random.choice(ASK_CODE_ZH if chinese else ASK_CODE_EN), answer))
    random.shuffle(asked)
    frame = random.choice(FRAMES_ZH if chinese else FRAMES_EN)
    (question, answer), *others = asked[:MOST_QUESTIONS]
    messages = [user(frame.format(p=("" if chinese else " ").join(told), q=question)), assistant(answer)]
    for question, answer in others:
        messages += [user(vary(random, question)), assistant(answer)]
    return messages


def told(random: Random) -> list[Message]:
    """Two or three things told one by one, then asked one by one."""
    kinds = SELF_ZH if random.random() < 0.35 else SELF_EN
    messages, asked = [], []
    for kind in random.sample(sorted(kinds), random.choice((1, 2, 2, 3))):
        said, reply, question, answer, values = kinds[kind]
        value = code_word(random) if values is None else random.choice(values)
        reply = reply.format(v=value)
        messages += [user(random.choice(said).format(v=value)), assistant(reply[0].upper() + reply[1:])]
        asked.append((question, answer.format(v=value)))
    random.shuffle(asked)
    for question, answer in asked:
        messages += [user(vary(random, question)), assistant(answer)]
    return messages


def picture(random: Random) -> list[Message]:
    """One picture and five different questions; the description, which would give the rest away, only at the end."""
    draw = random.choice((scene, crowded_scene))
    drawn = draw(random, place_clear=random.random() < 0.7)
    asks = [ask_how_many, ask_whether, ask_whether, ask_colour, ask_colour, ask_how_many]
    if all(abs(value * 3 % 1 - 0.5) < 0.3 for shape in drawn.shapes for value in (shape.x, shape.y)):
        asks += [ask_where] * 3
    asked: dict[str, str] = {}
    for ask in random.sample(asks, min(len(asks), MOST_QUESTIONS + 1)):
        pair = ask(random, drawn)
        if pair is not None and len(asked) < MOST_QUESTIONS - 1:
            asked.setdefault(*pair)
    asked.setdefault(*ask_what(random, drawn))
    return questioned(random, drawn, list(asked.items()))


def groups(random: Random) -> list[Message]:
    """The description of a picture in which several groups of shapes have to be counted, then their numbers again."""
    drawn = crowded_scene(random, place_clear=random.random() < 0.5)
    return questioned(random, drawn, [ask_what(random, drawn), ask_how_many(random, drawn)])


def places(random: Random) -> list[Message]:
    """One picture of several shapes, and where each of them is that is alone in its kind and colour."""
    single: list[Shape] = []
    while len(single) < 2:
        drawn = crowded_scene(random, place_clear=True)
        single = alone(drawn)
    random.shuffle(single)
    return questioned(random, drawn, [where_is(random, shape) for shape in single])


def questioned(random: Random, drawn: Scene, asked: Sequence[tuple[str, str]]) -> list[Message]:
    """Questions about one picture, one after the other, with their answers."""
    (question, answer), *others = asked
    messages = [show(drawn.draw(), vary(random, question)), assistant(answer)]
    for question, answer in others:
        messages += [user(vary(random, question)), assistant(answer)]
    return messages


def drills(pictures: bool) -> dict[str, Task]:
    """The drills of a model by name."""
    text: dict[str, Task] = {"drill: facts": facts, "drill: told": told}
    return text | ({"drill: picture": picture, "drill: groups": groups, "drill: places": places} if pictures else {})
