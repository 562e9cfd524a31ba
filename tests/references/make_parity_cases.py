"""Makes the parity cases: small random checkpoints in the published layouts, and what transformers makes of them.

Needs PyTorch and transformers, in an environment of their own (the tests need neither):

    pip install torch==2.13.0 transformers==5.24.0
    python tests/references/make_parity_cases.py [CASE ...]

Each case is an ordinary checkpoint folder `parity/<case>/` and a reference.npz with
    token_ids             int32 [length]
    pixels, grids         of all images, and video_pixels, video_grids of all videos: uint8 levels [patches, values],
                          which stand for the pixel values level / 127.5 - 1, and int32 [count, 3] (t, h, w)
    logits                float32 [length, vocab]
    greedy, margins       int32 and float32 [48]: the greedy continuation and its top-1 minus top-2 logits
    position_ids          int32 [3, length], and rope_delta
Every part has weights that matter (norms are no ones, biases no zeros), shapes divide into nothing convenient, and
weights are as large as it takes for a wrong detail to show: see `random_value`.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parent / "parity"
GREEDY = 48
SMALLEST_MARGIN = 1e-3  # of the logits' range, over the greedy steps: rounding must not decide a token
FEWEST_TOKENS = 12  # different ones among the greedy: a loop over two tokens would prove little
VOCAB = 203
END_TOKENS = [195, 196]
IMAGE, VIDEO, VISION_START, VISION_END = 197, 198, 199, 200
FIRST_SPECIAL = END_TOKENS[0]
# Plain PyTorch, without kernels that have demands on shapes.
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}

# The fields of the published config.json files, as transformers 4.57 wrote them.
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": END_TOKENS[1],
    "eos_token_id": END_TOKENS[0],
    "head_dim": 14,
    "hidden_act": "silu",
    "hidden_size": 36,
    "initializer_range": 0.02,
    "intermediate_size": 52,
    "max_position_embeddings": 512,
    "max_window_layers": 3,
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
}
MOE = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 14,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
VL_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": END_TOKENS[1],
    "dtype": "bfloat16",
    "eos_token_id": END_TOKENS[0],
    "head_dim": 20,
    "hidden_act": "silu",
    "hidden_size": 36,
    "initializer_range": 0.02,
    "intermediate_size": 44,
    "max_position_embeddings": 512,
    "model_type": "qwen3_vl_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 3, 3], "rope_type": "default"},
    "rope_theta": 10000.0,
    "use_cache": True,
    "vocab_size": VOCAB,
}
VISION = {
    "deepstack_visual_indexes": [1, 2, 3],
    "depth": 5,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 20,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 26,
    "model_type": "qwen3_vl",
    "num_heads": 1,
    "num_position_embeddings": 36,
    "out_hidden_size": 36,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
TWO_HEADS = {"hidden_size": 24, "num_heads": 2, "num_position_embeddings": 49, "depth": 4}
VL_MOE_TEXT = {name: value for name, value in MOE.items() if name in VL_TEXT or "expert" in name or "moe" in name} | {
    "decoder_sparse_step": 1,
    "head_dim": 12,
    "mlp_only_layers": [],
    "model_type": "qwen3_vl_moe_text",
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [2, 2, 2], "rope_type": "default"},
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}


def vision_language(text: dict[str, Any], vision: dict[str, Any], tied: bool = False) -> dict[str, Any]:
    """A whole vision-language config.json; `text` and `vision` are changes to the usual parts."""
    mixture = "moe" in text.get("model_type", "")
    family = "qwen3_vl_moe" if mixture else "qwen3_vl"
    return {
        "architectures": ["Qwen3VLMoeForConditionalGeneration" if mixture else "Qwen3VLForConditionalGeneration"],
        "image_token_id": IMAGE,
        "model_type": family,
        "text_config": (text if mixture else VL_TEXT | text),
        "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": VIDEO,
        "vision_config": VISION | vision | {"model_type": family},
        "vision_end_token_id": VISION_END,
        "vision_start_token_id": VISION_START,
    }


@dataclass(frozen=True)
class Picture:
    """A place of the prompt that holds an image, or a video with text before each of its `t` frame groups."""

    kind: str
    grid: tuple[int, int, int]


@dataclass(frozen=True)
class Case:
    """`prompt` lists its parts: a number of text tokens, or a picture. `new_style` has transformers 5 rewrite the
    config.json; `extra_head` stores the tied head too."""

    config: dict[str, Any]
    prompt: tuple[int | Picture, ...] = (45,)
    stored: torch.dtype = torch.bfloat16
    shards: int = 1
    extra_head: bool = False
    new_style: bool = False


THREE_IMAGES = (
    5,
    Picture("image", (1, 4, 8)),
    3,
    Picture("image", (1, 8, 6)),
    Picture("image", (1, 2, 10)),
    9,
)
CASES = {
    "dense_tied": Case(DENSE | {"tie_word_embeddings": True}, stored=torch.float32),
    "dense_tied_with_head": Case(
        DENSE | {"tie_word_embeddings": True, "head_dim": 22, "num_attention_heads": 3, "num_key_value_heads": 1},
        extra_head=True,
    ),
    "dense_untied": Case(
        DENSE | {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 26, "num_hidden_layers": 5},
        (83,),
        new_style=True,
    ),
    "dense_attention_bias": Case(DENSE | {"attention_bias": True}, (30,), new_style=True),
    "dense_float16": Case(
        DENSE | {"torch_dtype": "float16", "hidden_size": 44, "num_attention_heads": 5, "num_key_value_heads": 1},
        stored=torch.float16,
    ),
    "dense_bfloat16_sharded": Case(DENSE | {"torch_dtype": "bfloat16", "rms_norm_eps": 1e-05}, shards=3),
    "dense_yarn": Case(
        DENSE
        | {"head_dim": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
        # The spelling of the early Qwen3 cards; the test derives the two others.
        | {"rope_scaling": {"type": "yarn"} | YARN},
        (70,),
    ),
    "moe_renormalised": Case(MOE),
    "moe_not_renormalised": Case(MOE | {"norm_topk_prob": False, "rope_theta": 1000000.0}, new_style=True),
    "moe_mixed": Case(MOE | {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    "vl_image": Case(vision_language({}, {}), (4, Picture("image", (1, 6, 10)), 7)),
    "vl_images": Case(vision_language({}, TWO_HEADS), THREE_IMAGES, new_style=True),
    "vl_video": Case(vision_language({"num_hidden_layers": 4}, {}), (6, Picture("video", (3, 4, 6)), 8)),
    "vl_image_text": Case(
        vision_language({"num_key_value_heads": 3}, TWO_HEADS, tied=True), (3, Picture("image", (1, 12, 8)), 30)
    ),
    "vl_image_and_video": Case(
        vision_language({"num_key_value_heads": 3}, {"num_position_embeddings": 64}),
        (3, Picture("video", (2, 4, 8)), 5, Picture("image", (1, 6, 4)), 4, Picture("video", (1, 2, 4)), 6),
        new_style=True,
    ),
    # A low theta turns every frequency quickly, so that rows and columns matter much.
    "vl_mrope": Case(
        vision_language(
            {
                "head_dim": 24,
                "num_attention_heads": 2,
                "rope_theta": 20.0,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 2, 4], "rope_type": "default"},
            },
            {"depth": 4, "deepstack_visual_indexes": [1, 3]},
        ),
        (2, Picture("image", (1, 4, 16)), 4, Picture("image", (1, 10, 4)), 5),
        torch.float16,
    ),
    "vl_yarn": Case(
        vision_language(
            {"rope_scaling": VL_TEXT["rope_scaling"] | {"rope_type": "yarn"} | YARN, "max_position_embeddings": 128}, {}
        ),
        (20, Picture("image", (1, 8, 6)), 40),
    ),
    "vl_moe": Case(vision_language(VL_MOE_TEXT, TWO_HEADS), THREE_IMAGES),
}


def random_value(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Random numbers that make every part matter: sharp attention, outputs of the size of the residual stream, a router
    whose choice leaves a good share to the others, and mergers whose GELU works around -1.5, where its output is small
    beside the difference between its exact and its tanh form."""
    noise = torch.randn(shape, generator=generator)
    if name.endswith("bias"):
        return 0.3 * noise - (1.5 if "merger" in name and "linear_fc1" in name else 0)
    if len(shape) == 1:
        spread = torch.rand(shape, generator=generator)
        return 1 + spread if "q_norm" in name or "k_norm" in name else 0.5 + spread
    if "embed_tokens" in name:
        return 0.4 * noise  # small beside what the layers add, or tied models would echo their input
    if "pos_embed" in name:
        return noise
    return weight_scale(name) * noise / noise[0].numel() ** 0.5


def weight_scale(name: str) -> float:
    """The size of a matrix's outputs for inputs of size 1."""
    if name.endswith("mlp.gate.weight"):
        return 1.0
    if "merger" in name:
        return 1.0 if "linear_fc1" in name else 4.0
    return 3.0 if "lm_head" in name or "patch_embed" in name else 1.5


def fill(model: torch.nn.Module, stored: torch.dtype, seed: int) -> None:
    """Gives every parameter random numbers, rounded to the type they will be stored in."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        value = random_value(name, parameter.shape, generator)
        parameter.data = value.to(stored).float()


def published_tensors(model: torch.nn.Module, config: dict[str, Any]) -> dict[str, Tensor]:
    """The parameters under their published names: single experts for the text mixture, fused `[experts, in, out]` for
    the vision-language mixture."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        if ".experts." not in name:
            tensors[name] = tensor
        elif "text_config" in config:
            tensors[name] = tensor.transpose(1, 2)
        else:
            tensors |= single_experts(name, tensor)
    return tensors


def single_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """`[experts, out, in]` as one matrix per expert and projection."""
    stem, part = name.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return {
        f"{stem}.{expert}.{projection}.weight": half
        for expert, matrix in enumerate(tensor)
        for projection, half in zip(parts, matrix.chunk(len(parts)), strict=True)
    }


def write_config(folder: Path, case: Case) -> transformers.PretrainedConfig:
    """Writes config.json and generation_config.json; returns the former as transformers reads it."""
    write_json(folder / "config.json", case.config)
    write_json(folder / "generation_config.json", {"eos_token_id": END_TOKENS, "do_sample": False})
    config = transformers.AutoConfig.from_pretrained(folder)
    if case.new_style:
        config.save_pretrained(folder)
    return config


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


def write_weights(folder: Path, case: Case, model: torch.nn.Module) -> None:
    """Writes the safetensors files, and their index if there are several."""
    tensors = {
        name: tensor.to(case.stored).contiguous() for name, tensor in published_tensors(model, case.config).items()
    }
    if case.extra_head:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if case.shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    files = [f"model-{index + 1:05}-of-{case.shards:05}.safetensors" for index in range(case.shards)]
    shard_of = {name: files[index * case.shards // len(names)] for index, name in enumerate(names)}
    for file in files:
        part = {name: tensors[name] for name in names if shard_of[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": shard_of})


def make_inputs(case: Case, seed: int) -> dict[str, np.ndarray]:
    """Token ids, patches and grids of a prompt."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    levels: dict[str, list[np.ndarray]] = {"image": [], "video": []}
    grids: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
    for part in case.prompt:
        if isinstance(part, int):
            ids += random_text(random, part)
            continue
        frames, height, width = part.grid
        grids[part.kind].append(part.grid)
        levels[part.kind].append(random_patches(random, frames * height * width, case.config["vision_config"]))
        pads = [IMAGE if part.kind == "image" else VIDEO] * (height * width // 4)
        for _ in range(frames):
            timestamp = random_text(random, 3) if part.kind == "video" else []
            ids += [*timestamp, VISION_START, *pads, VISION_END]
    inputs = {"token_ids": np.array(ids, np.int32)}
    for kind, prefix in (("image", ""), ("video", "video_")):
        if grids[kind]:
            inputs[f"{prefix}pixels"] = np.concatenate(levels[kind])
            inputs[f"{prefix}grids"] = np.array(grids[kind], np.int32)
    return inputs


def random_text(random: np.random.Generator, length: int) -> list[int]:
    return random.integers(0, FIRST_SPECIAL, length).tolist()


def random_patches(random: np.random.Generator, count: int, vision: dict[str, Any]) -> np.ndarray:
    """Patches with a colour of their own and some texture, uint8 `[count, channels * temporal * patch * patch]`."""
    shape = (count, vision["in_channels"], vision["temporal_patch_size"] * vision["patch_size"] ** 2)
    colour = random.uniform(0, 255, (*shape[:2], 1))
    return np.clip(colour + random.normal(0, 50, shape), 0, 255).astype(np.uint8).reshape(count, -1)


def forward_arguments(inputs: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """What the model takes for these inputs."""
    ids = torch.from_numpy(inputs["token_ids"]).long()[None]
    arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for prefix, pixels, grid in (
        ("", "pixel_values", "image_grid_thw"),
        ("video_", "pixel_values_videos", "video_grid_thw"),
    ):
        if f"{prefix}grids" in inputs:
            arguments[pixels] = torch.from_numpy(inputs[f"{prefix}pixels"].astype(np.float32) / np.float32(127.5) - 1)
            arguments[grid] = torch.from_numpy(inputs[f"{prefix}grids"]).long()
            arguments["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return arguments


@torch.no_grad()
def reference(model: torch.nn.Module, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Logits, positions and the greedy continuation, in float32."""
    arguments = forward_arguments(inputs)
    logits = model(**arguments).logits[0]
    generated = model.generate(
        **arguments,
        max_new_tokens=GREEDY,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best = torch.cat(generated.logits).topk(2).values
    outputs = {
        "logits": logits.numpy(),
        "greedy": generated.sequences[0, logits.shape[0] :].numpy().astype(np.int32),
        "margins": (best[:, 0] - best[:, 1]).numpy(),
    }
    if "mm_token_type_ids" in arguments:
        known = ("mm_token_type_ids", "image_grid_thw", "video_grid_thw")
        grids = {name: arguments[name] for name in known if name in arguments}
        positions, delta = model.model.get_rope_index(arguments["input_ids"], **grids)
        outputs["position_ids"] = positions[:, 0].numpy().astype(np.int32)
        outputs["rope_delta"] = delta[0, 0].numpy().astype(np.int32)
    return outputs


def is_clear(outputs: dict[str, np.ndarray]) -> bool:
    """Whether the greedy continuation is varied, free of special tokens, and nowhere a matter of rounding."""
    greedy = outputs["greedy"]
    return (
        outputs["margins"].min() > SMALLEST_MARGIN * np.ptp(outputs["logits"])
        and len(np.unique(greedy)) >= FEWEST_TOKENS
        and greedy.max() < FIRST_SPECIAL
    )


def make_case(name: str, case: Case) -> None:
    """Takes the first seed whose continuation is clear; the reference is what transformers reads from the folder."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = write_config(folder, case)
    auto = (
        transformers.AutoModelForImageTextToText
        if "vision_config" in case.config
        else (transformers.AutoModelForCausalLM)
    )
    model = auto.from_config(config, dtype=torch.float32, **EAGER).eval()
    for seed in itertools.count():
        fill(model, case.stored, seed)
        inputs = make_inputs(case, seed)
        if is_clear(reference(model, inputs)):
            break
    write_weights(folder, case, model)
    loaded, report = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **EAGER)
    outputs = reference(loaded, inputs)
    np.savez_compressed(folder / "reference.npz", seed=seed, **inputs, **outputs)
    size = sum(file.stat().st_size for file in folder.iterdir())
    faults = {fault: found for fault, found in report.items() if found}
    print(
        f"{name}: seed {seed}, {len(inputs['token_ids'])} tokens, {size // 1024} KiB, "
        f"logits std {outputs['logits'].std():.1f}, {len(np.unique(outputs['greedy']))} different tokens, "
        f"smallest margin {outputs['margins'].min() / np.ptp(outputs['logits']):.1e}, loading faults {faults}",
        flush=True,
    )


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in sys.argv[1:] or CASES:
        make_case(name, CASES[name])


if __name__ == "__main__":
    main()
