"""Reading config.json: every published spelling, and refusals that name the field."""

import pytest

from models.config import parse_config
from models.errors import ConfigError
from models.rope import inverse_frequencies

YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_scaling": None, "rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", **YARN}},
    ],
)
def test_the_three_yarn_spellings_are_one(moe_values, spelling):
    values = {key: value for key, value in moe_values.items() if not key.startswith("rope")} | spelling
    rope = parse_config(values).text.rope
    assert rope.theta == 5e5
    assert (rope.yarn.factor, rope.yarn.original_length) == (4.0, 1024)


def test_yarn_and_mrope_together(vl_values):
    vl_values["text_config"]["rope_scaling"] |= {"rope_type": "yarn", **YARN}
    rope = parse_config(vl_values).text.rope
    assert rope.mrope_section == (4, 2, 2)
    frequencies, factor = inverse_frequencies(rope, 16)
    assert factor > 1
    assert frequencies[0] == 1.0
    assert frequencies[-1] == pytest.approx(5e6 ** (-14 / 16) / 4, rel=1e-5)


def test_yarn_makes_the_context_longer(moe_values):
    values = moe_values | {"max_position_embeddings": 40960}
    assert parse_config(values).text.longest_context == 40960
    for original, factor, longest in ((32768, 4.0, 131072), (32768, 1.1, 40960), (1000, 41.0005, 41000)):
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        assert parse_config(values | {"rope_scaling": scaling}).text.longest_context == longest


def test_a_missing_head_size_is_that_of_transformers(moe_values, vl_values):
    """128 for dense models; the mixtures share the hidden size among the heads."""
    del moe_values["head_dim"], vl_values["text_config"]["head_dim"]
    scaling = {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}
    vl_values["text_config"]["rope_scaling"] = scaling
    assert parse_config(moe_values | {"model_type": "qwen3"}).text.head_dim == 128
    assert parse_config(vl_values).text.head_dim == 128
    assert parse_config(moe_values).text.head_dim == 32 // 4
    vl_values["model_type"] = "qwen3_vl_moe"
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    scaling = scaling | {"mrope_section": [2, 1, 1]}
    vl_values["text_config"] |= mixture | {"model_type": "qwen3_vl_moe_text", "rope_scaling": scaling}
    assert parse_config(vl_values).text.head_dim == 32 // 4


def test_theta_comes_from_the_file_only(moe_values):
    del moe_values["rope_theta"]
    with pytest.raises(ConfigError, match="'rope_theta' is missing"):
        parse_config(moe_values)


@pytest.mark.parametrize(("place", "tied"), [("top", True), ("text", True), ("neither", False)])
def test_the_tie_flag_is_read_from_both_places(vl_values, place, tied):
    del vl_values["tie_word_embeddings"]
    if place != "neither":
        (vl_values if place == "top" else vl_values["text_config"])["tie_word_embeddings"] = True
    assert parse_config(vl_values).tied is tied


def test_moe_layers_follow_step_and_exceptions(moe_values):
    config = parse_config(moe_values | {"num_hidden_layers": 8, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert config.text.moe_layers == {1, 5, 7}


def test_renormalisation_is_the_files_choice_for_text_and_fixed_for_vision(moe_values, vl_values):
    assert parse_config(moe_values).text.moe.normalise is True
    assert parse_config(moe_values | {"norm_topk_prob": False}).text.moe.normalise is False
    vl_values["model_type"] = "qwen3_vl_moe"
    vl_values["text_config"] |= {
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": False,
    }
    assert parse_config(vl_values).text.moe.normalise is True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not one of"),
        ({"vocab_size": None}, "'vocab_size' is missing"),
        ({"hidden_size": "64"}, "'hidden_size' must be int, found '64'"),
        ({"hidden_size": True}, "'hidden_size' must be int, found True"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be positive"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
        ({"hidden_act": "gelu"}, "supports? only 'silu'"),
        ({"use_sliding_window": True}, "support only False"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok 7 exceeds num_experts 6"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3' is not one of"),
        ({"head_dim": 15}, "head_dim must be even"),
    ],
)
def test_refusals_name_the_field(moe_values, change, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(moe_values | change, "somewhere/config.json")


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("text_config", {"rope_scaling": None}, "needs 'mrope_section'"),
        ("text_config", {"rope_scaling": {"mrope_section": [4, 2, 2]}}, "only interleaved MRoPE"),
        ("text_config", {"rope_scaling": {"mrope_section": [4, 2, 3], "mrope_interleaved": True}}, "add up to"),
        ("vision_config", {"out_hidden_size": 31}, "must equal text hidden_size 32"),
        ("vision_config", {"deepstack_visual_indexes": [0, 3]}, "must lie in 0..2"),
        ("vision_config", {"num_position_embeddings": 35}, "square number"),
        ("vision_config", {"hidden_act": "relu"}, "'relu' is not"),
    ],
)
def test_refusals_of_a_vision_language_file(vl_values, part, change, message):
    vl_values[part] |= change
    with pytest.raises(ConfigError, match=message):
        parse_config(vl_values)
