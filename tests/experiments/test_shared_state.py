"""Two requests on one state: who has a turn when, what is told apart in their answers, and a run on tiny-vl."""

from argparse import Namespace
from collections.abc import Iterator

import pytest

from experiments import shared_state
from experiments.engines import KERNELS, EngineSteps
from experiments.experiment import Sample
from experiments.shared_state import (
    CONTEXT,
    EVERYTHING,
    FIGURES,
    SEPARATE,
    SERIALIZED,
    SHARED,
    Answer,
    Part,
    State,
    compared,
    pair_of,
    take_turns,
    two_requests,
)

TOKENS = 10


def test_turns_alternate_from_the_moment_on_that_the_second_comes():
    def turns(name: str, count: int, told: list[str]) -> Iterator[None]:
        for _ in range(count):
            told.append(name)
            yield

    for ahead, expected in ((2, "AABABAB"), (None, "AAAABBB"), (9, "AAAABBB")):
        told: list[str] = []
        take_turns(turns("A", 4, told), turns("B", 3, told), ahead)
        assert "".join(told) == expected


def test_states_share_the_parts_that_are_named_and_nothing_else():
    one = State(Part(1), Part(2), Part(3))
    other = one.sharing(("cache",))
    assert other.cache is one.cache
    assert (other.length.value, other.logits.value) == (None, None)
    assert one.length.value == 2


def made_up(shared: str, first: list[int], second: list[int], written: int = 10) -> Sample:
    """A pair whose prompts are 1 2 and 1 3."""
    answers = [first, second]
    texts = [" ".join(map(str, answer)) for answer in answers]
    told = {"questions": ["a | b", "c"], "prompts": [[1, 2], [1, 3]], "answers": answers, "texts": texts}
    return told | {"cell": {"pair": 0, "shared": shared}, "written": written, "needed": 12}


SAMPLES = [
    made_up(SERIALIZED, [10, 11, 12], [20, 21]),
    made_up(SEPARATE, [10, 11, 12], [20, 21]),
    *(made_up(shared, [10, 21, 3, 99], [20, 21], written=14) for shared in shared_state.MIXED),
]


def test_an_answer_is_told_apart_from_the_serialized_one():
    assert compared(SAMPLES[2], SAMPLES[0]) == [Answer(False, 1, 2, 1), Answer(True, 2, 0, 0)]
    assert compared(made_up(EVERYTHING, [10, 11], [20, 21, 1]), SAMPLES[0])[0] == Answer(False, 2, 0, 0)


def test_every_figure_is_read_off_the_pairs_that_it_is_about():
    found = [figure.found(SAMPLES) for figure in FIGURES]
    assert [row["measured"] for row in found] == [1, 1, 1, 1, 0]
    assert {row["verdict"] for row in found} == {"holds"}
    unharmed = [made_up(shared, [10, 11, 12], [20, 21]) for shared in SHARED]
    assert {figure.found(unharmed)["verdict"] for figure in FIGURES[:4]} == {"does not hold"}
    differing = [SAMPLES[0], made_up(SEPARATE, [10], [20, 21])]
    assert FIGURES[4].found(differing)["verdict"] == "does not hold"


def test_table_and_plot_show_what_was_sent():
    options = Namespace(model="tiny-vl", tokens=4, pairs=1)
    text = shared_state.table(SAMPLES, options)
    assert f"| {EVERYTHING} | 1 of 2 | 3 | 2 | 1 | 1 of 1 |" in text
    assert "| shared | `a ¦ b` | `c` |" in text
    assert f"| {EVERYTHING} | `10 21 3 99` | `20 21` |" in text
    bars, texts = shared_state.plot(SAMPLES, options).axes
    assert len(bars.get_yticklabels()) == len(SHARED)
    assert "    A: 10 21 3 99" in texts.texts[0].get_text()
    assert shared_state.printable("25、26。天 é") == "25,26.? ?"


@pytest.fixture(scope="module")
def steps() -> EngineSteps:
    return EngineSteps("tiny-vl", KERNELS, 1, CONTEXT)


def test_with_a_lock_the_sandbox_says_what_the_product_says(steps: EngineSteps):
    questions = pair_of(0, 0)
    told = two_requests(steps, questions, SERIALIZED, TOKENS)
    expected = [[step.token_id for step in steps.model.generate(text, max_tokens=TOKENS)] for text in questions]
    ends = steps.model.end_tokens
    assert told["answers"] == [[token for token in answer if token not in ends] for answer in expected]
    assert told["written"] <= told["needed"]
    assert two_requests(steps, questions, SEPARATE, TOKENS)["answers"] == told["answers"]


def test_without_a_lock_an_answer_changes(steps: EngineSteps):
    questions = pair_of(0, 0)
    told = two_requests(steps, questions, EVERYTHING, TOKENS)
    assert told["answers"] != two_requests(steps, questions, SERIALIZED, TOKENS)["answers"]
