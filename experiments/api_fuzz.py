"""Requests made from the server's own API document, valid and not, and each answer compared with the document.

Claim: no request is a failure of the server, and no answer is one that the document does not have. Cost: about half an
hour on 2 cores.

    python -m experiments.api_fuzz

Runs `python -m serving` with the small model and writes results/api_fuzz/.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import schemathesis
from hypothesis import strategies
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi import checks

from experiments.bench import ROOT, command_line
from experiments.environment import write_environment
from experiments.http_client import fetch
from experiments.server_process import running_server

ENDING = "/admin/shutdown"  # where a request is the last one
Statuses = dict[tuple[str, str], Counter[int]]


def no_failure_in_a_stream(context: object, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """The status of a stream is sent before it can fail."""
    assert b'"server_error"' not in response.content, f"the stream failed: {response.text[-300:]}"


CHECKS = [
    not_a_server_error,
    no_failure_in_a_stream,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


def send_requests(document: dict[str, Any], url: str, examples: int) -> Statuses:
    """Sends requests to every operation but the one that ends the server, and counts the statuses of the answers by
    operation and by how the requests were made: `positive` (as the document allows them) or `negative`. Every other
    positive one is the document's example with a few generated fields. The same requests every time.

    Raises:
        schemathesis' own failures, with the request as a curl command: an answer is not in the document.
    """
    statuses: Statuses = {}
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        if operation.path == ENDING:
            continue
        for mode in GenerationMode:
            if operation.body or mode is GenerationMode.POSITIVE:  # without a body, nothing can be wrong
                counted = statuses[operation.label, mode.value] = Counter()
                _send(operation, mode, url, examples if operation.body else 1, counted)
    return statuses


def _send(operation: APIOperation, mode: GenerationMode, url: str, examples: int, counted: Counter[int]) -> None:
    @hypothesis.settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode), random=strategies.randoms())
    def send(case: schemathesis.Case, random: Random) -> None:
        if mode is GenerationMode.POSITIVE and operation.body and random.random() < 0.5:
            fields = random.sample(sorted(case.body), min(len(case.body), random.randint(0, 2)))
            case.body = _example(operation) | {name: case.body[name] for name in fields}
        response = case.call_and_validate(base_url=url, checks=CHECKS)
        counted[response.status_code] += 1

    send()


def _example(operation: APIOperation) -> dict[str, Any]:
    """The request that the document gives as an example."""
    return operation.definition.raw["requestBody"]["content"]["application/json"]["example"]


def table(statuses: Statuses) -> str:
    """How often each operation gave each status."""
    lines = ["| operation | requests | answers by status |", "|---|---|---|"]
    for (operation, mode), counted in statuses.items():
        told = ", ".join(f"{status}: {count}" for status, count in sorted(counted.items()))
        lines.append(f"| `{operation}` | {mode} | {told} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Sends as many requests as the command line says, prints the table and writes the results."""
    made = argparse.ArgumentParser(prog="python -m experiments.api_fuzz", description=__doc__.split("\n")[0])
    made.add_argument("--model", default="tiny-vl")
    made.add_argument("--examples", type=int, default=500, help="requests to each operation, valid ones and others")
    made.add_argument("--out", type=Path, default=ROOT / "results" / "api_fuzz")
    options = made.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="api_fuzz_") as folder:
        log = Path(folder) / "server.log"
        with running_server(["--model", options.model, "--max-context", "512"], log) as server:
            _, document = asyncio.run(fetch(server, "GET", "/openapi.json"))
            statuses = send_requests(document, f"http://{server.host}:{server.port}", options.examples)
    command = command_line("api_fuzz", arguments)
    text = (
        "Every answer had a status, a type and a form that the document has, and none was 500.\n"
        f"`positive` requests are as the document allows them.\n\n{table(statuses)}"
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "table.md").write_text(f"    {command}\n\n{text}")
    write_environment(options.out)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:])
