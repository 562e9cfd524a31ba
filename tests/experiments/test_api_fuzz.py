"""A short run of the API document's requests, and that it sees what it is to see."""

import asyncio
import copy

import pytest
from schemathesis.core.failures import FailureGroup, ServerError

from experiments import api_fuzz
from serving import openapi
from serving.settings import Settings
from tests.serving.conftest import scripted_server
from tests.serving.scripted_model import ScriptedModel

DOCUMENT = openapi.document(Settings(model_id="scripted"))
EXAMPLES = 10


def only(path: str) -> dict:
    """The document with one path."""
    document = copy.deepcopy(DOCUMENT)
    document["paths"] = {path: document["paths"][path]}
    return document


async def send(document: dict, model: ScriptedModel, examples: int) -> api_fuzz.Statuses:
    async with scripted_server(model) as server:
        statuses = await asyncio.to_thread(api_fuzz.send_requests, document, server.url, examples)
        await server.idle()
    return statuses


async def test_every_answer_is_in_the_document():
    statuses = await send(DOCUMENT, ScriptedModel(max_context=512), EXAMPLES)
    bodies = [counted for (operation, _), counted in statuses.items() if operation.startswith("POST")]
    assert len(statuses) == 17
    assert len(bodies) == 10
    assert all(counted.total() >= EXAMPLES for counted in bodies)
    served = {operation for (operation, _), counted in statuses.items() if counted[200]}
    assert served >= {operation for operation, _ in statuses}, api_fuzz.table(statuses)
    assert "| `GET /health` | positive | 200: 1 |" in api_fuzz.table(statuses)


async def test_a_failure_is_seen():
    model = ScriptedModel()
    model.check_sampling = None  # whoever calls it fails
    with pytest.raises(FailureGroup) as found:
        await send(only("/v1/completions"), model, 20)
    assert any(isinstance(failure, ServerError) for failure in found.value.exceptions)


def streaming(path: str, request: str) -> dict:
    """The document with one path, whose requests all ask for a stream."""
    document = only(path)
    fields = document["components"]["schemas"][request]
    fields["properties"]["stream"] = {"const": True}
    fields["required"].append("stream")
    document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]["stream"] = True
    return document


@pytest.mark.parametrize(
    ("path", "request_name"),
    [
        ("/v1/chat/completions", "ChatRequest"),
        ("/v1/completions", "CompletionRequest"),
        ("/v1/messages", "MessagesRequest"),
    ],
)
async def test_every_event_of_a_stream_is_in_the_document(path, request_name):
    statuses = await send(streaming(path, request_name), ScriptedModel(max_context=512), EXAMPLES)
    assert statuses[f"POST {path}", "positive"][200], api_fuzz.table(statuses)


async def test_a_failure_in_a_stream_is_seen():
    model = ScriptedModel()
    model.items = None
    with pytest.raises(FailureGroup) as found:
        await send(streaming("/v1/chat/completions", "ChatRequest"), model, 20)
    assert any("the stream failed" in str(failure) for failure in found.value.exceptions)


async def test_an_answer_that_is_not_in_the_document_is_seen():
    document = only("/v1/models")
    document["components"]["schemas"]["Models"]["properties"]["object"] = {"type": "integer"}
    with pytest.raises(FailureGroup) as found:
        await send(document, ScriptedModel(), 1)
    assert any("integer" in str(failure) for failure in found.value.exceptions)
