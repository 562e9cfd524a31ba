"""Small networks with random weights, in the shapes that the tests share."""

import copy
from pathlib import Path

import pytest

from models.config import ModelConfig, parse_config
from models.inference import Inference
from models.presets import preset
from models.qwen_vocabulary import qwen_tokenizer
from models.switches import Switches
from models.tokenizer import Tokenizer
from models.weights import random_network

TEXT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}
VISION = {
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "depth": 3,
    "out_hidden_size": 32,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}
IMAGE, VIDEO = 290, 291


def small_vl_values() -> dict:
    """The `config.json` object of a small vision-language model."""
    values = copy.deepcopy(preset("qwen3-vl-2b")) | {"image_token_id": IMAGE, "video_token_id": VIDEO}
    values["text_config"] |= TEXT
    values["text_config"]["rope_scaling"] = {
        "mrope_interleaved": True,
        "mrope_section": [4, 2, 2],
        "rope_type": "default",
    }
    values["vision_config"] |= VISION
    return values


@pytest.fixture
def vl_values() -> dict:
    """`small_vl_values` for a test that changes it."""
    return small_vl_values()


@pytest.fixture
def moe_values() -> dict:
    """The `config.json` object of a small mixture-of-experts model."""
    mixture = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    return copy.deepcopy(preset("qwen3-30b-a3b")) | TEXT | mixture


@pytest.fixture(scope="session")
def vl_config() -> ModelConfig:
    return parse_config(small_vl_values())


@pytest.fixture(scope="session")
def vl_inference(vl_config: ModelConfig) -> Inference:
    """The jitted steps of the small vision-language model."""
    switches = Switches()
    return Inference(random_network(vl_config, "float32", switches), vl_config, switches)


@pytest.fixture(scope="session")
def qwen_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder of the tests' own, for the vocabulary."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def qwen(qwen_cache: Path) -> Tokenizer:
    """The real vocabulary, built from its ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(qwen_cache))
        return qwen_tokenizer()
