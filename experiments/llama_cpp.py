"""llama.cpp as a yardstick: a random model of the same shape as a GGUF file, and llama.cpp's own timings of running it.

Needs the optional packages of requirements-dev.txt: `xllamacpp` (llama.cpp itself) and `gguf` (its file format).
"""

from __future__ import annotations

import http.client
import importlib.util
import itertools
import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from models.config import ModelConfig, TextConfig
from models.errors import ConfigError
from models.quantisation import GROUP, SCHEMES
from models.weights import EMBEDDING_SCALE, RANDOM_BLOCK, UNIFORM_SPREAD

PACKAGES = ("xllamacpp", "gguf")
KINDS = {"q4": "Q4_0", "q8": "Q8_0", "float32": "F32", "bfloat16": "BF16"}  # GGUF's names of our formats
BLOCKS = {  # a group of 32 values in Q4_0 and Q8_0
    "q4": np.dtype([("scale", np.float16), ("values", np.uint8, GROUP // 2)]),
    "q8": np.dtype([("scale", np.float16), ("values", np.int8, GROUP)]),
}


@dataclass(frozen=True)
class LlamaModel:
    """What `file` will hold: the text model of `config` where ours has `quant`, a scheme or a dtype."""

    config: ModelConfig
    quant: str
    file: Path


def check_llama_cpp() -> None:
    """Raises ConfigError, which says what to install, if the packages are missing."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"llama.cpp needs the packages of requirements-dev.txt; missing: {', '.join(missing)}")


def tensor_shapes(text: TextConfig, tied: bool) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a text model, as numpy has it, under llama.cpp's name without `.weight`."""
    query, key_value = text.heads * text.head_dim, text.kv_heads * text.head_dim
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (text.vocab, text.hidden), "output_norm": (text.hidden,)}
    if not tied:
        shapes["output"] = (text.vocab, text.hidden)
    for layer in range(text.layers):
        attention = {
            "attn_norm": (text.hidden,),
            "attn_q": (query, text.hidden),
            "attn_k": (key_value, text.hidden),
            "attn_v": (key_value, text.hidden),
            "attn_q_norm": (text.head_dim,),
            "attn_k_norm": (text.head_dim,),
            "attn_output": (text.hidden, query),
            "ffn_norm": (text.hidden,),
        }
        parts = attention | (_expert_shapes(text) if layer in text.moe_layers else _mlp_shapes(text))
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _mlp_shapes(text: TextConfig) -> dict[str, tuple[int, ...]]:
    widen, narrow = (text.intermediate, text.hidden), (text.hidden, text.intermediate)
    return {"ffn_gate": widen, "ffn_up": widen, "ffn_down": narrow}


def _expert_shapes(text: TextConfig) -> dict[str, tuple[int, ...]]:
    experts, width = text.moe.experts, text.moe.intermediate
    widen, narrow = (experts, width, text.hidden), (experts, text.hidden, width)
    router = (experts, text.hidden)
    return {"ffn_gate_inp": router, "ffn_gate_exps": widen, "ffn_up_exps": widen, "ffn_down_exps": narrow}


def tensor_format(name: str, quant: str) -> str:
    """Which of `KINDS` a tensor has where ours has `quant`, a scheme or a dtype. Norms are never narrow, routers only
    with a dtype."""
    scheme = SCHEMES.get(quant)
    if "norm" in name or (scheme is not None and name.endswith("ffn_gate_inp")):
        return "float32"
    if scheme is None:
        return quant
    return scheme.vocabulary if name in ("token_embd", "output") else scheme.decoder


def write_model(config: ModelConfig, quant: str, file: Path) -> None:
    """Writes the text model of `config` with random weights, tensor by tensor, in the formats of `tensor_format`.

    Raises:
        ConfigError: a matrix's rows are no whole number of groups, which GGUF cannot hold.
    """
    import gguf

    text = config.text
    writer = gguf.GGUFWriter(file, "qwen3" if text.moe is None else "qwen3moe")
    _add_settings(writer, text)
    _add_vocabulary(writer, text.vocab)
    shapes = tensor_shapes(text, config.tied)
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType[KINDS[tensor_format(name, quant)]]
        group, size = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % group:
            raise ConfigError(f"{name} {shape}: GGUF's {kind.name} needs rows of a multiple of {group} values")
        writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), math.prod(shape) // group * size, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes.items():
        writer.write_tensor_data(_random_tensor(name, shape, tensor_format(name, quant)))
    writer.close()


def _add_settings(writer: Any, text: TextConfig) -> None:
    writer.add_context_length(text.max_positions)
    writer.add_embedding_length(text.hidden)
    writer.add_block_count(text.layers)
    writer.add_feed_forward_length(text.intermediate)
    writer.add_head_count(text.heads)
    writer.add_head_count_kv(text.kv_heads)
    writer.add_key_length(text.head_dim)
    writer.add_value_length(text.head_dim)
    writer.add_layer_norm_rms_eps(text.norm_eps)
    writer.add_rope_freq_base(text.rope.theta)
    if text.moe is not None:
        writer.add_expert_count(text.moe.experts)
        writer.add_expert_used_count(text.moe.top_k)
        writer.add_expert_feed_forward_length(text.moe.intermediate)


def _add_vocabulary(writer: Any, size: int) -> None:
    """A made-up vocabulary: prompts are given as token ids, and nobody reads the answers."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{token}" for token in range(size)])
    writer.add_token_types([1] * size)  # normal ones
    writer.add_token_merges(["t 0"])


def _random_tensor(name: str, shape: tuple[int, ...], format: str) -> np.ndarray:
    """Random values of the same spread as those of `models.weights.random_network`; norms are ones."""
    import gguf

    if len(shape) == 1:
        return np.ones(shape, np.float32)
    random, count = np.random.default_rng(len(name)), math.prod(shape)
    spread = EMBEDDING_SCALE if name == "token_embd" else shape[-1] ** -0.5
    if format not in BLOCKS:
        values = random.standard_normal(min(count, RANDOM_BLOCK), np.float32) * np.float32(spread)
        kind = gguf.GGMLQuantizationType[KINDS[format]]
        return np.resize(gguf.quantize(values, kind).view(np.uint8), count * gguf.GGML_QUANT_SIZES[kind][1])
    blocks = np.empty(min(count // GROUP, RANDOM_BLOCK), BLOCKS[format])
    blocks["scale"] = spread / UNIFORM_SPREAD[format]
    blocks["values"] = random.integers(-128, 128, blocks["values"].shape, np.int8).view(blocks["values"].dtype)
    return np.resize(blocks, count // GROUP)


class LlamaCpp:
    """One llama.cpp server in this process, with `batch` sequences (its "slots") for each context length."""

    def __init__(
        self, model: LlamaModel, kv: str, threads: int, contexts: Sequence[int], batch: int, room: int
    ) -> None:
        """Writes the model's file, opens it and fills the sequences; each has room for `room` tokens. `kv` is the type
        of the cache, such as "f16" (llama.cpp's own choice) or "q8_0"."""
        import xllamacpp

        write_model(model.config, model.quant, model.file)
        self.vocab = model.config.text.vocab
        self._seeds = itertools.count()  # no prompt comes twice
        self.first = {context: index * batch for index, context in enumerate(contexts)}
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(model.file)
        parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
        parameters.n_parallel = self.sequences = max(1, len(contexts)) * batch
        parameters.n_ctx = parameters.n_parallel * room
        parameters.kv_unified = False
        parameters.cache_type_k = parameters.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kv.upper()}")
        parameters.slot_save_path = f"{model.file.parent}/"
        parameters.cache_ram_mib = 0
        parameters.verbosity = 0
        self.server = xllamacpp.Server(parameters)
        for context in contexts:
            self._fill(context, batch)

    def _fill(self, context: int, batch: int) -> None:
        """Takes a prompt of `context` tokens into a sequence, and a copy of that into the others."""
        first = self.first[context]
        self._complete(first, self._prompt(context), tokens=1)
        self._copy("save", first)
        for slot in range(first + 1, first + batch):
            self._copy("restore", slot)

    def _prompt(self, length: int, last: int = 0) -> list[int]:
        """Random token ids, the same for the same length, and `last` behind them."""
        return [*np.random.default_rng(length).integers(0, self.vocab, length - 1).tolist(), last]

    def _copy(self, action: str, slot: int) -> None:
        address = urlsplit(self.server.listening_address)
        connection = http.client.HTTPConnection(address.hostname, address.port)
        body = json.dumps({"filename": "sequence"})
        connection.request("POST", f"/slots/{slot}?action={action}", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        if reply.status != 200:
            raise RuntimeError(f"llama.cpp did not {action} sequence {slot}: {text}")

    def _complete(self, slot: int, prompt: list[int], tokens: int, cached: bool = True) -> dict[str, float]:
        """The timings of one request, greedy by the shortest way: the best token and no other sampler."""
        reply = self.server.handle_completions(
            {
                "prompt": prompt,
                "max_tokens": tokens,
                "samplers": ["top_k"],
                "top_k": 1,
                "ignore_eos": True,
                "cache_prompt": cached,
                "id_slot": slot,
            }
        )
        if "timings" not in reply:
            raise RuntimeError(f"llama.cpp did not answer: {reply}")
        return reply["timings"]

    def decode(self, context: int, batch: int, steps: int) -> dict[str, Any]:
        """Milliseconds per step of each of `batch` sequences decoded together, behind `context` tokens; llama.cpp's
        own figure, which leaves out the prompt's last token. The rows differ in that token."""
        first = self.first[context]
        rows = range(batch)
        with ThreadPoolExecutor(batch) as threads:
            timings = list(
                threads.map(lambda row: self._complete(first + row, self._prompt(context, row), steps + 1), rows)
            )
        return {"ms": [timing["predicted_per_token_ms"] for timing in timings]}

    def answer(self, prompt: int, tokens: int, rows: int) -> dict[str, Any]:
        """Seconds for as many requests as there are sequences, that come at once, `rows` of them computed together."""
        count = self.sequences
        ids = [np.random.default_rng(next(self._seeds)).integers(0, self.vocab, prompt).tolist() for _ in range(count)]
        start = time.perf_counter()
        with ThreadPoolExecutor(rows) as threads:
            list(threads.map(lambda index: self._complete(index, ids[index], tokens, cached=False), range(count)))
        return {"seconds": time.perf_counter() - start}

    def prefill(self, length: int) -> dict[str, Any]:
        """Milliseconds from the prompt to the first token, llama.cpp's own figure."""
        timing = self._complete(0, self._prompt(length), tokens=1, cached=False)
        if timing["prompt_n"] != length:
            raise RuntimeError(f"llama.cpp took in {timing['prompt_n']} tokens of a prompt of {length}")
        return {"ms": timing["prompt_ms"]}
