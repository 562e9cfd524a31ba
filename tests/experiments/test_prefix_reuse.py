"""Reuse of prompts: what each kind shares, and what is told of made-up samples."""

from random import Random

import pytest

from experiments import prefix_reuse
from experiments.http_client import as_sent
from experiments.prefix_reuse import AGAIN, EXPERIMENT, KINDS, LONG, NEXT, NOTHING, OTHER, PICTURE, RESTART, SYSTEM

MS = 1_000_000


def stream(ms: int, reused: int, text: str = "a") -> dict:
    """A stream whose only text comes after `ms`, to a prompt of 100 tokens."""
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": reused}}
    return {"sent": 0, "events": [(ms * MS, "content", text), (2 * ms * MS, "done", "")], "usage": usage}


def samples(options):
    """1300 ms without reuse and 100 ms with it, where 99 tokens are reused; nothing is of what shares nothing."""
    for cell in EXPERIMENT.cells(options):
        shares = cell["reuse"] and cell["kind"] not in (NOTHING, OTHER)
        after = stream(100, 99) if shares else stream(1300, 0)
        yield {"cell": cell, "before": stream(1300, 0), "after": after}


def told_of(found):
    return {figure.what: figure.found(found) for figure in EXPERIMENT.figures}


def test_the_order_alternates_and_a_text_model_sees_no_pictures():
    cells = EXPERIMENT.cells(EXPERIMENT.parse(["--model", "tiny-moe", "--repeats", "2", "--restarts", "1"]))
    assert [cell["reuse"] for cell in cells if cell["kind"] == NEXT] == [True, False, False, True]
    assert [cell["repeat"] for cell in cells if cell["kind"] == RESTART] == [0, 0]
    assert {cell["kind"] for cell in cells} == set(KINDS) - {PICTURE, OTHER}


def test_table_plot_and_figures_of_made_up_samples():
    options = EXPERIMENT.parse(["--repeats", "2"])
    found = list(samples(options))
    text = EXPERIMENT.table(found, options)
    times = "1300.0 (1300.0..1300.0) | 100.0 (100.0..100.0) | 13.00 (13.00..13.00)"
    assert f"| next turn, long | 2 | 100 | 99 | {times} | 12.8 | 2 of 2 |" in text
    assert "| nothing shared | 2 | 100 | 0 |" in text
    assert EXPERIMENT.plot(found, options).axes
    told = told_of(found)
    assert told["second turn of a long conversation, times as fast to the first token"]["measured"] == 13
    assert told["time to the first token that reuse in memory saves"]["measured"] == pytest.approx(100 * 12 / 13)
    verdicts = {figure["verdict"] for figure in told.values()}
    assert verdicts == {"holds", "kept", "cannot be judged on this machine"}


def test_figures_that_do_not_hold():
    options = EXPERIMENT.parse(["--repeats", "2"])
    wrong = [
        sample | {"after": stream(1300, 50, "b" if sample["cell"]["reuse"] else "a")} for sample in samples(options)
    ]
    told = told_of(wrong)
    assert told["answers that are the same with reuse"]["measured"] == 0
    assert told["tokens that are computed of a prompt that comes again"]["measured"] == 50
    failed = {what for what, figure in told.items() if figure["verdict"] == "does not hold"}
    judged = {figure.what for figure in EXPERIMENT.figures if figure.holds is not None}
    assert failed == judged - {"a prompt that shares nothing, times as fast with reuse on"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_two_prompts_share(kind):
    options = EXPERIMENT.parse(["--quick"])
    random = Random(0)
    told = prefix_reuse.exchange(kind, random, lambda tokens: prefix_reuse.words(random, tokens), options)
    before, after = ([as_sent(message) for message in messages] for messages in (told.before, told.asked("yes")))
    if kind in (NEXT, LONG, RESTART):
        assert after[:-1] == [*before, {"role": "assistant", "content": "yes"}]
        assert after[-1]["role"] == "user"
    elif kind == SYSTEM:
        assert before[0] == after[0]
        assert before[1] != after[1]
    elif kind in (PICTURE, OTHER):
        [[seen, asked], [seen_then, asked_then]] = (message["content"] for [message] in (before, after))
        assert (seen == seen_then) == (kind == PICTURE)
        assert asked != asked_then
    else:
        assert (before == after) == (kind == AGAIN)
