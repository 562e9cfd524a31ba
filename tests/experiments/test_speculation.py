"""Guessing tokens: what is told of made-up samples, and real answers of a model made to repeat itself."""

from itertools import islice
from random import Random

import pytest

from experiments import speculation
from experiments.bench_batch import random_ids, request
from experiments.speculation import AGAIN, COPIED, EXPERIMENT, FREE, NOTHING, REPETITIVE, TEXT
from models.batch import Batch, BatchLimits


def samples(options):
    """11 tokens in 10 steps without guesses; with them 10 guesses, 5 of them right, in 5 steps, but none in free text
    or where nothing is found. 100 ms without guesses, 60 ms with right ones and 110 ms with wrong ones."""
    for cell in EXPERIMENT.cells(options):
        if cell["part"] == TEXT:
            right = cell["guesses"] and cell["kind"] != FREE
            yield {"cell": cell, "tokens": list(range(11)), "steps": 5 if right else 10, "guessed": 10 if right else 0}
        else:
            found = cell["guesses"] and cell["share"] != NOTHING
            right = found and cell["share"] > 0
            ms = 60.0 if right else 110.0 if found else 100.0
            steps, guessed = (5 if right else 10), (8 if found else 0)
            yield {"cell": cell, "tokens": list(range(11)), "steps": steps, "guessed": guessed, "ms": ms}


def test_table_plot_and_figures_of_made_up_samples():
    options = EXPERIMENT.parse(["--questions", "1", "--repeats", "2"])
    found = list(samples(options))
    text = EXPERIMENT.table(found, options)
    assert f"| tiny-vl | {COPIED} | 4 | 1 of 1 | 50.0% | 2.00 |" in text
    assert f"| tiny-vl | {FREE} | 8 | 1 of 1 |  | 1.00 |" in text
    assert f"| 4 | {REPETITIVE} of them right | 62.5% | 6.0 (6.0..6.0) | 1.67 (1.67..1.67) |" in text
    assert "| 0 |  |  | 10.0 (10.0..10.0) | 1.00 (1.00..1.00) |" in text
    repetitive, free, *wrong, exact, text, pictures, right, same = (
        figure.found(found) for figure in EXPERIMENT.figures
    )
    assert (repetitive["measured"], repetitive["verdict"]) == (pytest.approx(100 / 60), "holds")
    assert (free["measured"], free["verdict"]) == (1, "holds")
    assert [each["measured"] for each in wrong] == [pytest.approx(100 / 110)] * 2
    assert {each["verdict"] for each in wrong} == {"cannot be judged on this machine"}
    assert [each["verdict"] for each in (exact, text, pictures)] == ["does not hold", "holds", "holds"]
    assert (right["measured"], right["verdict"]) == (0.5, "does not hold")
    assert (same["measured"], same["verdict"]) == (1, "holds")
    shares = EXPERIMENT.plot(found, options).axes[1]
    assert [label.get_text() for label in shares.texts].count("no guesses") == 2
    other = [sample | {"tokens": [1]} if sample["cell"]["guesses"] == 8 else sample for sample in found]
    assert EXPERIMENT.figures[-1].found(other)["verdict"] == "does not hold"


def test_what_is_asked_again_has_its_answer_before_it():
    [again] = islice(speculation.questions(AGAIN, Random(0)), 1)
    [free] = islice(speculation.questions(FREE, Random(0)), 1)
    assert again[: len(free)] == free
    assert again[len(free)]["role"] == "assistant"
    assert again[-1] == free[-1]


def test_right_guesses_spare_steps_and_wrong_ones_change_nothing():
    inference = speculation.repeating_inference("tiny-vl")
    ids = random_ids(inference.config, 16, 0)

    def said(guesses: int, share: float) -> dict:
        draft = speculation.made_up(share)
        return speculation.answer(Batch(inference, 64, BatchLimits(draft=guesses)), request(ids, 11), draft)

    alone, right, wrong, nothing = said(0, 1.0), said(2, 1.0), said(2, 0.0), said(2, NOTHING)
    assert set(alone["tokens"]) == {ids[-1]}
    assert right["tokens"] == wrong["tokens"] == nothing["tokens"] == alone["tokens"]
    assert [sample["steps"] for sample in (alone, right, wrong, nothing)] == [10, 4, 10, 10]
    assert (right["guessed"], speculation.accepted(right)) == (6, 6)
    assert (wrong["guessed"], speculation.accepted(wrong)) == (2 * 8 + 1, 0)
    assert nothing["guessed"] == alone["guessed"] == 0
