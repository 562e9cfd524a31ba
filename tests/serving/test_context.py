"""The original's `context_mode` and `context_tokens`: what of a conversation the model sees, and what it has seen."""

from __future__ import annotations

from typing import Any

import pytest

from serving import media

from .chat_client import COMPLETIONS, data_url, frames
from .conftest import Server
from .test_media import filmed, png, refused, video

TURNS = [
    ("system", "be brief"),
    ("user", "one"),
    ("assistant", "1"),
    ("user", "two"),
    ("assistant", "2"),
    ("user", "x"),
]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]
ALL = {"stream_options": {"include_metrics": True, "include_tokens": True}}


async def answered(server: Server, messages: list[dict], **fields: Any) -> dict:
    response = await server.client.post(COMPLETIONS, json={"messages": messages, **ALL, **fields})
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    ("mode", "kept"),
    [("full", MESSAGES), ("last", [MESSAGES[0], MESSAGES[5]]), ("last3", [MESSAGES[0], *MESSAGES[3:]])],
)
async def test_the_prompt_is_that_of_the_kept_messages(server, mode, kept):
    trimmed, whole = await answered(server, MESSAGES, context_mode=mode), await answered(server, kept)
    for answer in (trimmed, whole):
        del answer["usage"]["prompt_tokens_details"]  # the second finds what the first has left
    assert trimmed["history_tokens"] == whole["history_tokens"]
    assert trimmed["usage"] == whole["usage"]
    tokens = (await server.client.post("/tokenize", json={"messages": MESSAGES, "context_mode": mode})).json()["tokens"]
    assert tokens == whole["history_tokens"][: whole["usage"]["prompt_tokens"]]


async def test_a_picture_that_is_left_out_is_not_decoded(server, monkeypatch):
    monkeypatch.setattr(media, "open_image", lambda data: pytest.fail("decoded"))
    image = {"type": "image_url", "image_url": {"url": data_url(png())}}
    messages = [{"role": "user", "content": [image] * 17}, {"role": "user", "content": "x"}]
    assert (await answered(server, messages, context_mode="last"))["choices"][0]["message"]["content"] == "x"


async def test_an_error_names_the_place_in_the_request(server):
    messages = [*MESSAGES, *filmed({"type": "image_url", "image_url": {"url": "x"}})["messages"]]
    assert (await refused(server, {"messages": messages, "context_mode": "last"}))["param"] == (
        "messages.6.content.0.image_url.url"
    )


async def test_the_tokens_of_the_turn_before_are_recognised(server):
    """And change nothing."""
    first = await answered(server, MESSAGES[:2])
    history = first["history_tokens"]
    assert "context_tokens" not in first["metrics"]
    following = [*MESSAGES[:2], {"role": "assistant", "content": "one"}, {"role": "user", "content": "two"}]
    plain = await answered(server, following)
    assert plain["history_tokens"][: len(history)] == history
    known = await answered(server, following, context_tokens=history)
    assert known["metrics"]["context_tokens"] == len(history)
    assert known["history_tokens"] == plain["history_tokens"]
    assert known["usage"]["total_tokens"] == plain["usage"]["total_tokens"]
    response = await server.client.post(
        COMPLETIONS, json={"messages": following, "context_tokens": history, "stream": True, **ALL}
    )
    [told] = [frame["metrics"] for frame in frames(response.text) if "metrics" in frame]
    assert told["context_tokens"] == len(history)


async def test_other_tokens_are_ignored(server):
    """Also those that would write a system message."""
    plain = await answered(server, MESSAGES)
    history = plain["history_tokens"]
    control = server.model.tokenizer.id_of("<|im_start|>")
    for tokens in ([], [65], history[1:], [*history[:5], control], history, history + [65] * 5000):
        answer = await answered(server, MESSAGES, context_tokens=tokens)
        assert answer["metrics"]["context_tokens"] == 0
        assert answer["history_tokens"] == history


async def test_pictures_look_alike_in_tokens(server):
    """So a conversation that has any is never taken for another one, as in the original."""
    history = (await answered(server, filmed(video(2))["messages"]))["history_tokens"]
    answer = await answered(server, filmed(video(2))["messages"], context_tokens=history[:3])
    assert answer["metrics"]["context_tokens"] == 0


@pytest.mark.parametrize("token", [-1, 263, 10**30])
async def test_tokens_that_do_not_exist(server, token):
    error = await refused(server, {"messages": MESSAGES, "context_tokens": [1, token]})
    assert error["param"].split(".")[0] == "context_tokens"
    assert str(token) in error["message"]
