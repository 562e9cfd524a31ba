"""The small models' own vocabulary: a byte-level BPE trained on their tasks, with Qwen3's control tokens."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from experiments.tiny_pictures import picture_tasks
from experiments.tiny_tasks import SYSTEM, text_tasks

SIZE = 2048  # with the control tokens
SAMPLES_PER_TASK = 4000
# Qwen's split: contractions, letters with one leading mark, single digits, marks, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def train_vocabulary() -> Tokenizer:
    """The same vocabulary for both models, so that it is trained on the tasks of both. Deterministic."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=SIZE - len(CONTROL) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKS])
    return tokenizer


def _texts() -> list[str]:
    texts = ["system\nuser\nassistant\n", *SYSTEM]
    tasks = text_tasks(True) | text_tasks(False) | picture_tasks()
    for name, task in sorted(tasks.items()):
        random = Random(name)
        for _ in range(SAMPLES_PER_TASK if not name.startswith("picture") else SAMPLES_PER_TASK // 10):
            for message in task(random):
                content = message["content"]
                texts += [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]
    return texts


def save_vocabulary(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes `tokenizer.json` and the `tokenizer_config.json` that transformers reads beside it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
