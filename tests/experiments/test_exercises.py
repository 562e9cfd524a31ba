"""Exercises of the small models: which are about pictures, and a model's own answers to them."""

import models
from experiments import exercises
from experiments.exercises import PICTURES, TEXTS
from experiments.tiny_tasks import assistant, numbers, user


def test_tasks_about_pictures_are_told_from_texts():
    kinds = {task: exercises.kind_of(task) for task in exercises.tasks_of("tiny-vl")}
    assert kinds["picture: describe"] == PICTURES
    assert kinds["picture: missing"] == kinds["counting"] == TEXTS
    assert exercises.tasks_of("qwen3-vl-2b") == {}


def test_shares_are_of_all_answers_of_a_kind():
    samples = [
        {"cell": {"part": "counting"}, "right": 3, "count": 4},
        {"cell": {"part": "greeting"}, "right": 1, "count": 4},
        {"cell": {"part": "logits"}, "difference": 0.1},
    ]
    assert exercises.share_right(samples, TEXTS) == 0.5
    assert exercises.share_right(samples, PICTURES) is None
    assert "| counting | 3 of 4 |" in exercises.task_table("tiny-vl", {"one": samples})


def test_answers_are_the_models_own_and_counted_when_right(monkeypatch):
    monkeypatch.setattr(exercises, "ROWS", 2)
    model = models.load("tiny-vl", max_context=512)
    asked = [[user(f"Count from 1 to {last}."), assistant(numbers(1, last, ", "))] for last in (3, 5, 4)]
    assert exercises.answers(model, asked) == [messages[-1]["content"] for messages in asked]
    wrong = [[user("Count from 1 to 3."), assistant("4, 5, 6")], asked[0]]
    monkeypatch.setattr(exercises, "held_out", lambda task, seed, count: wrong[:count])
    told = exercises.right_answers(model, exercises.tasks_of("tiny-vl")["counting"], "seed", 2)
    assert (told["right"], told["count"]) == (1, 2)
