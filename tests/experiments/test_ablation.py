"""The ablation: which details a model has, what is told of made-up samples, and real logits."""

from random import Random

from experiments import ablation
from experiments.ablation import ARMS, EXPERIMENT, LOGITS, PUBLISHED, VIDEO, Arms
from experiments.tiny_tasks import user
from models import Switches

DEEPSTACK, QK_NORM, FRAMES = "DeepStack off", "no query and key norm", "no frame mask"


def samples(options):
    """Every task 4 of 4 right, without DeepStack 3 of 4; logits differ by 0.1, on the video by 0.3."""
    for cell in EXPERIMENT.cells(options):
        if cell["part"] != LOGITS:
            off = cell["arm"] == DEEPSTACK
            yield {"cell": cell, "right": 3 if off else 4, "count": 4, "given": ["a", "a", "a", "b" if off else "a"]}
            continue
        for prompt in [*ablation.tasks_of(cell["model"]), *([VIDEO] if cell["model"] == "tiny-vl" else [])]:
            difference = 0.0 if cell["arm"] == PUBLISHED else 0.3 if prompt == VIDEO else 0.1
            yield {"cell": cell, "prompt": prompt, "difference": difference, "divergence": 0.01, "flips": 0.25}


def test_each_model_has_its_own_details():
    assert ablation.arms_of("tiny-moe") == [PUBLISHED, "transformers' default theta", QK_NORM]
    assert ablation.arms_of("tiny-vl") == list(ARMS)
    assert all(switches != Switches() for arm, switches in ARMS.items() if arm != PUBLISHED)


def test_table_plot_and_figures_of_made_up_samples():
    options = EXPERIMENT.parse(["--conversations", "4"])
    found = list(samples(options))
    text = EXPERIMENT.table(found, options)
    assert f"| tiny-vl | {DEEPSTACK} | 7 | 0.1 (..0.3) | 0.01 | 25.0% | 75.0% | 75.0% | 14 of 56 |" in text
    assert f"| tiny-vl | {FRAMES} | 1 | 0.3 (..0.3) | 0.01 | 25.0% | 100.0% | 100.0% | 0 of 56 |" in text
    assert f"| tiny-moe | {QK_NORM} | 7 | 0.1 (..0.1) | 0.01 | 25.0% | 100.0% |  | 0 of 28 |" in text
    assert "| counting | 4 of 4 | 3 of 4 |" in text
    deepstack, positions, texts, pictures, every = (figure.found(found) for figure in EXPERIMENT.figures)
    assert (deepstack["measured"], deepstack["verdict"]) == (0.75, "holds")
    assert [(each["measured"], each["n"]) for each in (positions, texts, pictures)] == [(1, 1), (1, 2), (1, 1)]
    assert {each["verdict"] for each in (positions, texts, pictures)} == {"cannot be judged on this machine"}
    assert (every["lowest"], every["verdict"]) == (0.1, "kept")
    title = EXPERIMENT.plot(found, options).get_suptitle()
    assert title.endswith("without DeepStack: 75.0%, with it: 100.0%")


def test_as_many_right_answers_without_deepstack_are_no_fewer():
    found = [sample | {"right": 4} if "right" in sample else sample for sample in samples(EXPERIMENT.parse([]))]
    assert EXPERIMENT.figures[0].found(found)["verdict"] == "does not hold"


def test_a_detail_of_pictures_changes_them_and_no_text(monkeypatch):
    prompts = [
        ("counting", [user("Count from 1 to 3.")]),
        ("video", ablation.video(Random(0))),
    ]
    monkeypatch.setattr(ablation, "fixed_prompts", lambda model, seed: prompts)
    arms = Arms()
    wanted = arms.published_logits("tiny-vl", 0)
    text, pictures = ablation.differences(arms.opened("tiny-vl", DEEPSTACK), wanted, 0)
    assert text["difference"] < 1e-5
    assert text["flips"] == 0
    assert pictures["difference"] > 0.01
    assert pictures["tokens"] == len(wanted["video"]) > text["tokens"]
    assert pictures["divergence"] > 1e-3 > text["divergence"]
