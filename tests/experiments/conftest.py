"""A vocabulary and a pair of models like the small trained ones, but small enough to train in a test."""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest
from tokenizers import Tokenizer

from experiments import tiny_vocabulary
from experiments.tiny_models import TINY_MODELS, TinyModel
from experiments.tiny_tasks import Task

os.environ["MPLBACKEND"] = "agg"  # plots open no windows, whatever is set here

DECODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1} | {
    "head_dim": 16,
    "intermediate_size": 48,
}
VISION = {"hidden_size": 16, "num_heads": 2, "depth": 2, "intermediate_size": 24, "out_hidden_size": 32} | {
    "deepstack_visual_indexes": [0]
}


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Tokenizer:
    """The small models' vocabulary, trained on fewer samples."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_vocabulary, "SAMPLES_PER_TASK", 300)
        return tiny_vocabulary.train_vocabulary()


def smaller(model: TinyModel) -> TinyModel:
    """The same model with few and narrow layers."""
    config = dict(model.config)
    if not model.pictures:
        config |= DECODER | {"moe_intermediate_size": 16, "num_experts": 4}
    else:
        rope = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
        config["text_config"] = config["text_config"] | DECODER | {"rope_scaling": rope}
        config["vision_config"] = config["vision_config"] | VISION
    return dataclasses.replace(model, config=config)


@dataclass(frozen=True)
class TaughtLittle(TinyModel):
    """A model that is taught a single task, so that few shapes are compiled."""

    task: str

    def tasks(self) -> dict[str, Task]:
        return {self.task: super().tasks()[self.task]}

    def phases(self) -> list[tuple[float, Mapping[str, float]]]:
        return [(share, dict.fromkeys(weights, 0.0) | {self.task: 1.0}) for share, weights in super().phases()]


@pytest.fixture
def usual_promotion() -> Iterator[None]:
    """optax mixes types as JAX allows by default."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(params=sorted(TINY_MODELS))
def small_model(request: pytest.FixtureRequest) -> TinyModel:
    """Each of the two models in turn."""
    return smaller(TINY_MODELS[request.param])


@pytest.fixture
def small_vl() -> TinyModel:
    return smaller(TINY_MODELS["tiny-vl"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a test exports to."""
    return tmp_path / "model"
