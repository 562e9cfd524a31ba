"""A trained small model as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from experiments.tiny_models import PREPROCESSOR, TinyModel, full_config
from experiments.tiny_vocabulary import save_vocabulary
from models.chat_template import DEFAULT_TEMPLATE
from models.config import parse_config
from models.network import Network
from models.weights import save_weights


def export(model: TinyModel, tokenizer: Tokenizer, network: Network, folder: Path) -> None:
    """Writes weights in bfloat16, configuration, vocabulary, template and, for a model that sees, the preprocessor."""
    folder.mkdir(parents=True, exist_ok=True)
    config = full_config(model, tokenizer)
    end = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"do_sample": False, "eos_token_id": end, "pad_token_id": end[1]})
    save_weights(network, parse_config(config), folder, "bfloat16")
    save_vocabulary(tokenizer, folder)
    shutil.copyfile(DEFAULT_TEMPLATE, folder / "chat_template.jinja")
    if model.pictures:
        _write_json(folder / "preprocessor_config.json", PREPROCESSOR)


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
