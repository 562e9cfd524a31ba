"""Makes the reference answers of the small trained models, from transformers.

Needs PyTorch and transformers, in an environment of their own (the tests need neither):

    pip install torch==2.13.0 transformers==5.24.0 pillow==13.0.0 jinja2==3.1.6
    python -m tests.references.make_tiny_answers [NAME ...]

To be run again when a folder in models/pretrained has changed. Each is loaded as any checkpoint is: tokenizer, chat
template, picture processor and weights come from its files through the Auto classes. Writes the pictures to
`tiny_answers/`, and `tiny_answers/<name>.json` with
    weights      the SHA-256 of model.safetensors
    most_tokens  where an answer is cut off
    answers      per prompt: its messages, with pictures by their file names; token_ids of the prompt; greedy, the ids
                 of the answer with its end token; and for each of them the ids and float32 logits of the most likely
                 tokens, top_ids and top_logits `[tokens, 5]`
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from experiments.tiny_pictures import Scene, Shape

FOLDER = Path(__file__).parent / "tiny_answers"
PRETRAINED = Path(__file__).parents[2] / "models" / "pretrained"
MOST_TOKENS = 64
TOP = 5
PAD = "<|image_pad|>"
SMALLEST_MARGIN = 1e-4  # of a step's logits' range: rounding must not decide a token
SCENES = {
    "square.png": Scene(
        160, 160, (255, 255, 255), (Shape("circle", "red", 0.3, 0.3, 0.15), Shape("square", "blue", 0.7, 0.75, 0.13))
    ),
    "wide.png": Scene(240, 160, (225, 235, 245), (Shape("triangle", "green", 0.8, 0.25, 0.16),)),
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def show(picture: str, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}


TEXTS = [
    [user("从1数到20")],
    [user("What is 7 + 5?")],
    [user("Anna lives in Paris. Ben likes soup. The code word is K7QX.\nWhat is the code word?")],
    [
        {"role": "system", "content": "You are a helpful assistant."},
        user("My name is Emma."),
        {"role": "assistant", "content": "Nice to meet you, Emma."},
        user("What is my name?"),
    ],
]
PROMPTS = {
    "tiny-moe": [*TEXTS, [user("Repeat: river seven K7QX Lisbon")], [user("写一首关于春天的诗。")]],
    "tiny-vl": [
        *TEXTS,
        [show("square.png", "What is in this picture?")],
        [
            show("wide.png", "图里有什么？"),
            {"role": "assistant", "content": "一个绿色三角形。"},
            user("Where is the green triangle?"),
        ],
    ],
}


def draw_pictures() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, scene in SCENES.items():
        image = scene.draw()
        image.info.clear()
        image.save(FOLDER / name)


@dataclass(frozen=True)
class Reader:
    """A folder as transformers opens it; `pictures` is None for a text model."""

    model: transformers.PreTrainedModel
    tokenizer: transformers.PreTrainedTokenizerBase
    pictures: transformers.BaseImageProcessor | None

    @classmethod
    def open(cls, folder: Path) -> Reader:
        sees = (folder / "preprocessor_config.json").is_file()
        auto = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
        model, report = auto.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
        )
        print(f"{folder.name}: loading faults { ({fault: found for fault, found in report.items() if found}) }")
        # The implementation that this project's picture processor equals to the bit.
        pictures = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil") if sees else None
        return cls(model.eval(), transformers.AutoTokenizer.from_pretrained(folder), pictures)

    def inputs(self, messages: list[dict[str, Any]]) -> dict[str, Tensor]:
        """What the model takes, as `Qwen3VLProcessor` puts it together; that class itself asks for torchvision, which
        only its videos need."""
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        contents = [message["content"] for message in messages if isinstance(message["content"], list)]
        images = [Image.open(FOLDER / part["image"]) for parts in contents for part in parts if "image" in part]
        if not images:
            return dict(self.tokenizer(text, return_tensors="pt"))
        seen = self.pictures(images=images, return_tensors="pt")
        before, *after = text.split(PAD)
        tokens = [int(grid.prod()) // self.pictures.merge_size**2 for grid in seen["image_grid_thw"]]
        text = before + "".join(PAD * count + rest for count, rest in zip(tokens, after, strict=True))
        inputs = self.tokenizer(text, return_tensors="pt")
        kinds = (inputs["input_ids"] == self.model.config.image_token_id).int()
        return dict(inputs) | dict(seen) | {"mm_token_type_ids": kinds}


@torch.no_grad()
def answer(reader: Reader, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One greedy answer; ends the script where rounding could decide a token."""
    inputs = reader.inputs(messages)
    output = reader.model.generate(
        **inputs, max_new_tokens=MOST_TOKENS, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    logits = torch.cat(output.logits)
    assert logits.dtype == torch.float32
    best = logits.topk(TOP)
    margins = (best.values[:, 0] - best.values[:, 1]) / (logits.max(dim=1).values - logits.min(dim=1).values)
    ids = inputs["input_ids"][0].tolist()
    greedy = output.sequences[0, len(ids) :].tolist()
    print(f"{reader.tokenizer.decode(greedy)!r}, smallest margin {margins.min():.1e} of the range", flush=True)
    if margins.min() < SMALLEST_MARGIN:
        sys.exit(f"rounding could decide a token of this answer; change the prompt: {messages}")
    return {
        "messages": messages,
        "token_ids": ids,
        "greedy": greedy,
        "top_ids": best.indices.tolist(),
        "top_logits": best.values.tolist(),
    }


def make_answers(name: str) -> None:
    reader = Reader.open(PRETRAINED / name)
    references = {
        "weights": hashlib.sha256((PRETRAINED / name / "model.safetensors").read_bytes()).hexdigest(),
        "most_tokens": MOST_TOKENS,
        "answers": [answer(reader, messages) for messages in PROMPTS[name]],
    }
    text = json.dumps(references, ensure_ascii=False)
    (FOLDER / f"{name}.json").write_text(text.replace('"}], "', '"}],\n"').replace('], "', '],\n"') + "\n")


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    draw_pictures()
    for name in sys.argv[1:] or PROMPTS:
        make_answers(name)


if __name__ == "__main__":
    main()
