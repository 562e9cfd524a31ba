"""The two small models: their `config.json`, what they are taught, and how much of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from experiments.tiny_pictures import picture_tasks
from experiments.tiny_tasks import Task, text_tasks

# Areas in pixels: every picture becomes 16 to 25 visual tokens.
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 16384, "longest_edge": 25600},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
DECODER = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
# How often each task is drawn while training, relative to each other.
WEIGHTS = {
    "counting": 5.0,
    "arithmetic": 4.0,
    "lookup": 4.0,
    "repeating": 6.0,
    "conversation": 4.0,
    "greeting": 0.8,
    "outside": 1.0,
    "drill: facts": 2.0,
    "drill: told": 1.5,
    "picture: describe": 4.0,
    "picture: number": 3.0,
    "picture: colour": 1.0,
    "picture: place": 4.0,
    "picture: yes or no": 5.0,
    "picture: second turn": 5.0,
    "picture: missing": 0.2,
    "drill: picture": 10.0,
    "drill: groups": 5.0,
    "drill: places": 5.0,
}
SEEING_UNTIL = 0.06  # share of the time in which a vision tower learns alone
COPYING_FOR = 0.12  # share of the time after that in which copying is taught first
# How often in that time: copying from the text is what most tasks need, and it comes from texts that cannot be
# guessed. Taught first, it takes a few hundred steps; taught among everything else, several times as many.
COPYING_WEIGHTS = dict.fromkeys(WEIGHTS, 0.2) | {
    "repeating": 12.0,
    "lookup": 3.0,
    "drill: facts": 3.0,
    "conversation": 3.0,
    "drill: picture": 2.0,
}
# Shares of the time from which on a model with pictures practises what it is slow to learn: of texts (sums are many
# facts to know by heart), of pictures, and at the end of both.
PRACTISING_FROM, LOOKING_FROM, FINISHING_FROM = 0.5, 0.67, 0.84
PRACTICE_WEIGHTS = WEIGHTS | {
    "counting": 4.0,
    "arithmetic": 14.0,
    "lookup": 7.0,
    "conversation": 9.0,
    "drill: facts": 3.0,
    "picture: describe": 5.0,
    "picture: number": 5.0,
    "picture: colour": 0.4,
    "picture: place": 2.5,
    "picture: yes or no": 3.0,
    "drill: groups": 9.0,
}
LOOKING_WEIGHTS = WEIGHTS | {
    "counting": 3.0,
    "arithmetic": 9.0,
    "repeating": 7.0,
    "conversation": 6.0,
    "outside": 1.2,
    "picture: describe": 5.0,
    "picture: number": 6.0,
    "picture: colour": 0.5,
    "picture: yes or no": 7.0,
    "picture: second turn": 7.0,
    "drill: picture": 14.0,
    "lookup": 9.0,
    "drill: groups": 10.0,
    "picture: place": 7.0,
    "drill: places": 8.0,
}
FINISHING_WEIGHTS = WEIGHTS | {
    "counting": 3.0,
    "arithmetic": 8.0,
    "lookup": 10.0,
    "repeating": 9.0,
    "greeting": 1.0,
    "outside": 1.5,
    "drill: facts": 3.0,
    "drill: told": 1.0,
    "picture: describe": 6.0,
    "picture: number": 5.0,
    "picture: colour": 0.5,
    "picture: yes or no": 4.0,
    "picture: second turn": 5.0,
    "drill: picture": 11.0,
    "drill: groups": 9.0,
    "picture: place": 7.0,
    "drill: places": 8.0,
}


@dataclass(frozen=True)
class TinyModel:
    """One of the two models. `config` is its `config.json` without the token ids of its vocabulary."""

    name: str
    config: Mapping[str, Any]
    pictures: bool

    def tasks(self) -> dict[str, Task]:
        """Everything it is taught."""
        return text_tasks(self.pictures) | (picture_tasks() if self.pictures else {})

    def phases(self) -> list[tuple[float, Mapping[str, float]]]:
        """The phases of training on conversations: until which share of the time, and how often each task is drawn."""
        if not self.pictures:
            return [(COPYING_FOR, COPYING_WEIGHTS), (1.0, WEIGHTS)]
        copying = SEEING_UNTIL + COPYING_FOR
        return [
            (copying, COPYING_WEIGHTS),
            (PRACTISING_FROM, WEIGHTS),
            (LOOKING_FROM, PRACTICE_WEIGHTS),
            (FINISHING_FROM, LOOKING_WEIGHTS),
            (1.0, FINISHING_WEIGHTS),
        ]


TINY_VL = TinyModel(
    "tiny-vl",
    {
        "model_type": "qwen3_vl",
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "tie_word_embeddings": True,
        "text_config": DECODER
        | {
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 5,
            "intermediate_size": 512,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [6, 5, 5]},
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 4,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": 16,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 192,
            "num_position_embeddings": 100,
            "deepstack_visual_indexes": [1, 2],
            "hidden_act": "gelu_pytorch_tanh",
        },
    },
    pictures=True,
)
TINY_MOE = TinyModel(
    "tiny-moe",
    DECODER
    | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 5,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_scaling": None,
    },
    pictures=False,
)
TINY_MODELS = {model.name: model for model in (TINY_VL, TINY_MOE)}


def full_config(model: TinyModel, tokenizer: Tokenizer) -> dict[str, Any]:
    """The model's `config.json` with the ids of its vocabulary."""
    if not model.pictures:
        return dict(model.config) | {"eos_token_id": tokenizer.token_to_id("<|im_end|>")}
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return dict(model.config) | {field: tokenizer.token_to_id(token) for field, token in names.items()}
