"""The cache's precision: which tokens count, what is told of made-up samples, and a real text."""

from random import Random

import numpy as np
import pytest

import models
from experiments import kv_precision
from experiments.kv_precision import EXPERIMENT, SURPRISE
from experiments.tiny_tasks import assistant, user

BYTES = {"float32": 229_376, "bfloat16": 114_688, "int8": 59_136}
MORE = {"float32": 0.0, "bfloat16": 0.01, "int8": 0.05}


def samples(options):
    """Nats per token 1 in a passage's first stretch and 2 in the others, and a little more with narrow caches, more so
    in later passages; a millisecond for each byte of a number and 1024 tokens."""
    for cell in EXPERIMENT.cells(options):
        if cell["part"] == SURPRISE:
            more = MORE[cell["kv"]] * (1 + cell["passage"])
            nats = [10 * ((2 if stretch else 1) + more) for stretch in range(len(options.lengths))]
            yield {"cell": cell, "nll": nats, "tokens": [10] * len(nats)}
        else:
            size = BYTES[cell["kv"]]
            yield {"cell": cell, "bytes": size, "ms": [30 + size * cell["context"] / 2**26] * 2}


def test_table_plot_and_figures_of_made_up_samples():
    options = EXPERIMENT.parse(["--passages", "2", "--repeats", "2"])
    found = list(samples(options))
    text = EXPERIMENT.table(found, options)
    assert "| tiny-vl | 0 to 128 | 20 | 1.0000 | +0.0150 (+0.0100..+0.0200) | +0.0750 (+0.0500..+0.1000) |" in text
    assert "| tiny-moe | all | 60 | 1.6667 | +0.0150 (+0.0100..+0.0200) | +0.0750 (+0.0500..+0.1000) |" in text
    assert "| int8 | 59,136 | 30.2 (30.2..30.2) |" in text
    mean, most, full, narrow, share, pace = (figure.found(found) for figure in EXPERIMENT.figures)
    assert (mean["measured"], mean["n"], mean["verdict"]) == (pytest.approx(0.075), 2, "holds")
    assert (most["measured"], most["verdict"]) == (pytest.approx(0.1), "holds")
    assert (full["verdict"], narrow["verdict"]) == ("holds", "holds")
    assert (share["measured"], share["verdict"]) == (pytest.approx(0.258, abs=1e-3), "holds")
    assert (pace["measured"], pace["n"]) == (pytest.approx(33.5 / 30.9, abs=1e-3), 2)
    assert pace["verdict"] == "cannot be judged on this machine"
    assert EXPERIMENT.plot(found, options).axes
    worse = [sample | {"nll": [3 * nats for nats in sample["nll"]]} for sample in found if "nll" in sample]
    assert EXPERIMENT.figures[0].found(worse)["verdict"] == "does not hold"
    lost = [sample | {"nll": [sample["nll"][0], 0.0, 0.0]} for sample in found if "nll" in sample]
    assert EXPERIMENT.figures[0].found(lost) == mean  # beyond the first stretch nothing is judged


def test_answers_with_their_ends_are_what_counts():
    model = models.load("tiny-vl")
    ids = model.prompt(
        [user("Hello!"), assistant("Hi!"), user("Count from 1 to 2."), assistant("1, 2")], add_generation_prompt=False
    ).token_ids
    said = model.tokenizer.decode(ids[kv_precision.spoken(model, ids)].tolist())
    assert said.replace("<|im_end|>", "|") in ("Hi!1, 2", "Hi!|1, 2|")
    ends = np.flatnonzero(ids == model.tokenizer.id_of("<|im_end|>"))
    assert kv_precision.spoken(model, ids)[ends].tolist() == [False, True, False, True]


def test_a_text_with_each_cache():
    opened = kv_precision.with_caches(models.load("tiny-vl", max_context=600))
    ids = kv_precision.passage(opened["float32"], Random(0), 64)
    assert len(ids) == 64
    found = {kv: kv_precision.surprise(model, ids, [16, 64]) for kv, model in opened.items()}
    full = found["float32"]
    logits = models.load("tiny-vl").logits(ids).astype(np.float64)
    odds = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    counted = np.flatnonzero(kv_precision.spoken(opened["float32"], ids)[1:])
    assert sum(full["nll"]) == pytest.approx(-odds[counted, ids[counted + 1]].sum(), abs=1e-3)
    assert sum(full["tokens"]) == len(counted) > 5
    for kv in ("bfloat16", "int8"):
        assert found[kv]["tokens"] == full["tokens"]
        assert 0 < abs(sum(found[kv]["nll"]) - sum(full["nll"])) < 0.1 * len(counted)
