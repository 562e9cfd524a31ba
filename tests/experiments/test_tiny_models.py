"""What the small models are and are taught: their parts fit each other."""

import pytest
from tokenizers import Tokenizer

from experiments.tiny_drills import drills
from experiments.tiny_models import (
    COPYING_FOR,
    COPYING_WEIGHTS,
    PREPROCESSOR,
    SEEING_UNTIL,
    TINY_MODELS,
    WEIGHTS,
    TinyModel,
    full_config,
)
from models.config import parse_config


def taught(model: TinyModel) -> set[str]:
    """Names of everything in training."""
    return set(model.tasks() | drills(model.pictures))


def test_every_task_has_its_weights_and_every_weight_a_task() -> None:
    everything = set.union(*map(taught, TINY_MODELS.values()))
    for _, weights in [phase for model in TINY_MODELS.values() for phase in model.phases()]:
        assert set(weights) == everything
        assert min(weights.values()) > 0


@pytest.mark.parametrize("name", TINY_MODELS)
def test_the_copying_mix_is_mostly_copying(name: str) -> None:
    copying = {"repeating", "lookup", "drill: facts", "conversation"}
    for weights, least, most in ((COPYING_WEIGHTS, 0.8, 1.0), (WEIGHTS, 0.0, 0.7)):
        shares = {task: weights[task] for task in taught(TINY_MODELS[name])}
        assert least < sum(shares[task] for task in copying) / sum(shares.values()) < most


def test_phases_leave_most_of_the_time_to_everything() -> None:
    assert 0 < SEEING_UNTIL < SEEING_UNTIL + COPYING_FOR < 0.3
    for model in TINY_MODELS.values():
        shares = [share for share, _ in model.phases()]
        assert shares == sorted(set(shares))
        assert shares[-1] == 1.0


def test_configuration_holds_the_ids_of_the_vocabulary(tiny_tokenizer: Tokenizer) -> None:
    config = parse_config(full_config(TINY_MODELS["tiny-vl"], tiny_tokenizer))
    assert tiny_tokenizer.id_to_token(config.image_token) == "<|image_pad|>"
    assert tiny_tokenizer.id_to_token(config.video_token) == "<|video_pad|>"
    end = full_config(TINY_MODELS["tiny-moe"], tiny_tokenizer)["eos_token_id"]
    assert tiny_tokenizer.id_to_token(end) == "<|im_end|>"


def test_the_preprocessor_cuts_what_the_tower_takes() -> None:
    vision = TINY_MODELS["tiny-vl"].config["vision_config"]
    for ours, theirs in (("patch_size",) * 2, ("temporal_patch_size",) * 2, ("merge_size", "spatial_merge_size")):
        assert PREPROCESSOR[ours] == vision[theirs]
