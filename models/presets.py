"""The published shapes of the models this project is about, as their own `config.json` gives them.

Presets serve runs with random weights; a checkpoint always brings its own configuration. Sources: the model cards'
configuration files of Qwen3-VL-2B-Instruct, Qwen3-VL-8B-Instruct, Qwen3-30B-A3B and Qwen3-VL-30B-A3B-Instruct.
"""

from __future__ import annotations

from typing import Any

from models.errors import ConfigError

_DECODER = {
    "vocab_size": 151936,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
}
_MIXTURE = {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_VL_DECODER = _DECODER | {
    "max_position_embeddings": 262144,
    "rope_theta": 5000000,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}
_VISION = {
    "in_channels": 3,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
}
_LARGE_VISION = _VISION | {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_VL_TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}

PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-vl-2b": _VL_TOKENS
    | {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "text_config": _VL_DECODER
        | {
            "model_type": "qwen3_vl_text",
            "hidden_size": 2048,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "intermediate_size": 6144,
        },
        "vision_config": _VISION
        | {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "out_hidden_size": 2048,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    },
    "qwen3-vl-8b": _VL_TOKENS
    | {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "text_config": _VL_DECODER
        | {
            "model_type": "qwen3_vl_text",
            "hidden_size": 4096,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 12288,
        },
        "vision_config": _LARGE_VISION | {"out_hidden_size": 4096},
    },
    "qwen3-30b-a3b": _DECODER
    | _MIXTURE
    | {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rope_scaling": None,
    },
    "qwen3-vl-30b-a3b": _VL_TOKENS
    | {
        "model_type": "qwen3_vl_moe",
        "tie_word_embeddings": False,
        "text_config": _VL_DECODER | _MIXTURE | {"model_type": "qwen3_vl_moe_text"},
        "vision_config": _LARGE_VISION | {"out_hidden_size": 2048},
    },
}

# Qwen3's generation_config.json: a turn ends with <|im_end|> or <|endoftext|>.
EOS_TOKENS = (151645, 151643)


def preset(name: str) -> dict[str, Any]:
    """The published `config.json` object of `name`.

    Raises:
        ConfigError: there is no such preset; the message lists them.
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset is named '{name}'; the presets are {', '.join(PRESETS)}")
    return PRESETS[name]
