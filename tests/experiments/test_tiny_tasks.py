"""The text tasks: every answer is worked out again from the request, by other means than the generators use."""

import re
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from experiments.tiny_tasks import (
    OUTSIDE_EN,
    OUTSIDE_ZH,
    UNSEEN_EN,
    UNSEEN_ZH,
    Message,
    Task,
    arithmetic,
    conversation,
    counting,
    greeting,
    held_out,
    lookup,
    outside,
    refusal,
    repeating,
    text_tasks,
    with_system,
)

TASKS = [(pictures, name) for pictures in (False, True) for name in text_tasks(pictures)]


def samples(task: Task, count: int = 300) -> list[list[Message]]:
    random = Random(5)
    return [task(random) for _ in range(count)]


def integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def result_of(a: int, sign: str, b: int) -> int:
    words = {"plus": "+", "加": "+", "minus": "-", "减": "-", "times": "x", "乘": "x", "乘以": "x", "*": "x", "×": "x"}
    operations: dict[str, Callable[[], int]] = {"+": lambda: a + b, "-": lambda: a - b, "x": lambda: a * b}
    return operations[words.get(sign, sign)]()


@pytest.mark.parametrize(("pictures", "name"), TASKS)
def test_conversation_form(pictures: bool, name: str) -> None:
    for messages in samples(text_tasks(pictures)[name], 100):
        assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert all(message["content"].lstrip() == message["content"] != "" for message in messages)
        assert not re.search(r"[{}]", "".join(message["content"] for message in messages))  # every blank was filled


@pytest.mark.parametrize(("pictures", "name"), TASKS)
def test_same_seed_same_conversation(pictures: bool, name: str) -> None:
    task = text_tasks(pictures)[name]
    assert samples(task, 20) == samples(task, 20)
    assert task(Random(1)) != task(Random(2)) or task(Random(1)) != task(Random(3))


def test_counting_visits_every_number_once() -> None:
    lengths = Counter()
    for request, answer in samples(counting):
        first, last = integers(request["content"])
        counted = integers(answer["content"])
        assert counted[0] == first
        assert counted[-1] == last
        assert {after - before for before, after in pairwise(counted)} == {1 if last > first else -1}
        lengths[len(counted)] += 1
    assert max(lengths) <= 31


def test_documented_counting_prompts_are_of_the_task() -> None:
    requests = {request["content"] for request, _ in samples(counting, 10_000)}
    assert {"从1数到20", "Count from 1 to 20"} <= requests


def test_arithmetic_is_right() -> None:
    signs = Counter()
    for request, answer in samples(arithmetic):
        a, sign, b = re.search(r"(\d+) ?([^\d\s]+) ?(\d+)", request["content"]).groups()
        said = re.fullmatch(r"(\d+) ([-+x]) (\d+) = (\d+)", answer["content"])
        assert (said[1], said[3]) == (a, b)
        assert int(said[4]) == result_of(int(a), sign, int(b)) == result_of(int(a), said[2], int(b))
        signs[said[2]] += 1
    assert min(signs.values()) > 40


def test_lookup_answers_with_what_the_paragraph_says() -> None:
    codes = 0
    for request, answer in samples(lookup):
        if code := re.search(r"(?:code word is |暗号是)(\w+)[.。]", answer["content"]):
            codes += 1
            assert request["content"].count(code[1]) == 1
            assert re.search(rf"(?:code word(?: is)? |暗号是?){code[1]}[.。]", request["content"])
        else:
            assert request["content"].count(answer["content"]) == 1
            subject = re.match(r"[A-Z][a-z]+|[小老阿].", answer["content"])[0]
            assert subject in re.split(r"[.。]", request["content"])[-1]
    assert codes > 60


def test_lookup_tells_nothing_about_a_subject_twice() -> None:
    for request, answer in samples(lookup):
        told = re.findall(r"(\w+) (lives in|likes|has a|works as a|is \d)", request["content"])
        assert len(told) == len(set(told))
        assert answer["content"] != ""


def test_repeating_repeats() -> None:
    for request, answer in samples(repeating):
        assert re.split(r": |：", request["content"], maxsplit=1)[1] == answer["content"]


def test_conversation_needs_an_earlier_turn() -> None:
    kinds = Counter()
    for messages in samples(conversation(False)):
        *earlier, request, answer = messages
        before = " ".join(message["content"] for message in earlier)
        numbers = integers(answer["content"])
        if re.fullmatch(r"\d+ [-+] \d+ = \d+", answer["content"]):
            kinds["sum"] += 1
            assert numbers[0] == integers(earlier[-1]["content"])[-1]
            assert numbers[1] == integers(request["content"])[0]
            assert numbers[2] == result_of(numbers[0], answer["content"].split()[1], numbers[1])
        elif re.search(r"数到|on to|to \d", request["content"]):
            kinds["count"] += 1
            last = integers(earlier[-1]["content"])[-1]
            assert numbers == list(range(last + 1, integers(request["content"])[0] + 1))
        else:
            kinds["told"] += 1
            value = re.search(r"(?:[ 叫在吃是]|a )(\w+)[.。]$", answer["content"])[1]
            value = value.removeprefix("你喜欢吃").removeprefix("你住在").removeprefix("你叫").removeprefix("暗号是")
            assert value in before
            assert value not in request["content"]
    assert min(kinds.values()) > 30


def test_greeting_says_what_the_model_can_do() -> None:
    for pictures, word in ((True, "pictures"), (False, "greet")):
        replies = {answer["content"] for _, answer in samples(greeting(pictures))}
        assert any(reply.startswith("I can count") and word in reply for reply in replies)
        assert any("small demonstration model" in reply for reply in replies)
        assert all("pictures" not in reply for reply in replies) or pictures


@pytest.mark.parametrize("pictures", [False, True])
def test_outside_is_always_declined_in_the_language_asked(pictures: bool) -> None:
    english, chinese = refusal(pictures)
    for request, answer in samples(outside(pictures)) + samples(outside(pictures, unseen=True)):
        asked_in_chinese = re.search(r"[\u4e00-\u9fff]", request["content"]) is not None
        assert answer["content"] == (chinese if asked_in_chinese else english)


def test_no_request_is_both_taught_and_declined() -> None:
    declined = {request["content"].lower().rstrip(".?!。？！") for request, _ in samples(outside(True), 2000)}
    for name, task in text_tasks(True).items():
        if name != "outside":
            taught = {messages[0]["content"].lower().rstrip(".?!。？！") for messages in samples(task, 500)}
            assert not declined & taught, name


def test_unseen_wordings_are_not_trained_on() -> None:
    assert not {*UNSEEN_EN, *UNSEEN_ZH} & {*OUTSIDE_EN, *OUTSIDE_ZH}
    unseen = {request["content"] for request, _ in samples(outside(False, unseen=True))}
    assert not unseen & {request["content"] for request, _ in samples(outside(False), 2000)}


def test_one_in_sixteen_is_held_out() -> None:
    requests = {messages[0]["content"]: messages for messages in samples(counting, 4000)}
    share = sum(map(held_out, requests.values())) / len(requests)
    assert share == pytest.approx(1 / 16, abs=0.015)


def test_holding_out_looks_at_everything_but_the_answer() -> None:
    request = next(messages for messages in samples(counting) if held_out(messages))[0]
    assert held_out([request, {"role": "assistant", "content": "another answer"}])
    others = [{"role": "user", "content": f"{request['content']} {number}"} for number in range(100)]
    assert not all(held_out([other, {"role": "assistant", "content": ""}]) for other in others)


def test_a_quarter_has_a_system_message() -> None:
    random = Random(2)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    dressed = [with_system(random, messages) for _ in range(1000)]
    assert all(conversation[-2:] == messages for conversation in dressed)
    assert 180 < sum(conversation[0]["role"] == "system" for conversation in dressed) < 320
