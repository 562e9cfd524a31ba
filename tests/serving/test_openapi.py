"""The API document. Requests made from it are sent in tests/experiments/test_api_fuzz.py."""

from __future__ import annotations

import re

import jsonschema_rs
import pytest

from models.sampling import MAX_TOP_LOGPROBS
from serving import openapi
from serving.app import create_app
from serving.engine import Engine
from serving.settings import Settings

from .conftest import scripted_server
from .scripted_model import ScriptedModel

DOCUMENT = openapi.document(Settings())
OPERATIONS = [f"{method.upper()} {path}" for path, entry in DOCUMENT["paths"].items() for method in entry]


def test_the_schemas_are_valid_and_refer_to_each_other():
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema | {"$schema": "https://json-schema.org/draft/2020-12/schema"})
    references = set(re.findall(r"#/components/schemas/(\w+)", repr(DOCUMENT)))
    assert references <= DOCUMENT["components"]["schemas"].keys()


def test_no_two_schemas_have_the_same_name():
    assert openapi._requests("tiny-vl").keys().isdisjoint(openapi._answers())


def test_every_route_is_in_the_document_and_no_other():
    app = create_app(Engine(ScriptedModel, Settings()), Settings())
    routes = {
        f"{method} {rule.rule.replace('<path:name>', '{model}')}"
        for rule in app.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
        if not rule.rule.startswith("/page/")  # the files of the page
    }
    assert routes == set(OPERATIONS)


def test_ranges_are_those_that_are_checked():
    fields = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    assert fields["top_logprobs"]["anyOf"] == [
        {"maximum": MAX_TOP_LOGPROBS, "minimum": 0, "type": "integer"},
        openapi.NULL,
    ]
    assert fields["temperature"]["anyOf"][0] == {"maximum": 2.0, "minimum": 0.0, "type": "number"}


@pytest.mark.parametrize("keys", [(), ("key",)])
async def test_the_document_is_served_and_says_whether_a_key_is_needed(keys):
    async with scripted_server(api_keys=keys, model_id=Settings().model_id) as server:
        assert (await server.client.get("/openapi.json")).status_code == (401 if keys else 200)
        served = (await server.client.get("/openapi.json", headers={"X-Api-Key": "key"})).json()
        assert served["security"] == (openapi.KEYS if keys else [])
        assert served["paths"] == DOCUMENT["paths"]
