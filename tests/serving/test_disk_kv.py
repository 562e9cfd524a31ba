"""A conversation that goes on after the server has been restarted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from .chat_client import COMPLETIONS
from .conftest import PATIENCE, tiny_server

SYSTEM = {"role": "system", "content": "You are a small model. " * 12}
ONE, TWO = "the-first-key", "the-second-key"


def chat(url: str, key: str, messages: list[dict[str, Any]]) -> tuple[str, int]:
    """An answer, and the tokens of its prompt that were not computed."""
    headers = {"X-Api-Key": key}
    answer = httpx.post(f"{url}{COMPLETIONS}", json={"messages": messages}, headers=headers, timeout=PATIENCE).json()
    usage = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0]["message"]["content"], usage["cached_tokens"]


def test_the_next_turn_goes_on_from_files_for_the_same_key_only(tmp_path: Path):
    keys, folder = tmp_path / "keys", tmp_path / "kept"
    keys.write_text(f"{ONE}\n{TWO}\n")
    arguments = ("--disk-kv", str(folder), "--api-key-file", str(keys))
    messages = [SYSTEM, {"role": "user", "content": "My name is Anna."}]
    with tiny_server(*arguments) as url:
        messages.append({"role": "assistant", "content": chat(url, ONE, messages)[0]})
    messages.append({"role": "user", "content": "What is my name?"})
    with tiny_server(*arguments) as url:
        computed, cached = chat(url, TWO, messages)
        assert cached == 0
        answer, cached = chat(url, ONE, messages)
        assert answer == computed
        assert cached >= 64
        told = httpx.get(f"{url}/health", timeout=PATIENCE).json()["disk_cache"]
        assert (told["queries"], told["hits"], told["read_tokens"]) == (2, 1, cached)
        metrics = httpx.get(f"{url}/metrics", headers={"X-Api-Key": ONE}, timeout=PATIENCE).text
        assert f'kestrel:disk_cache_read_tokens_total{{model_name="tiny-vl"}} {cached}.0' in metrics
    assert len(list(folder.glob("*.safetensors"))) >= told["files"] > 0
