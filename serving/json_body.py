"""The JSON body of a request: read, and checked field by field before any work is done for it."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from quart import request
from werkzeug.exceptions import RequestEntityTooLarge

from serving.errors import ApiError, bad_request
from serving.settings import Settings

DEEPEST_NESTING = 64
MOST_MESSAGES = 2048
MOST_VALUES = 2**20  # each takes many times as much memory as its text
SMALL_BODY = 2**16  # bytes; checked within milliseconds
# A union reports each of its branches; their names are no part of the request.
BRANCHES = ("list[", "constrained-", "function-", "literal[", "dict[")


class Strict(BaseModel):
    """No coercion: a boolean is no number, a text no number. Unknown fields are ignored, as clients add new ones."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


Fields = TypeVar("Fields", bound=Strict)
Parsed = TypeVar("Parsed")


class Bodies:
    """Takes in the bodies of requests, which may take up so much memory together.

    A large body is parsed by `parser`: on the event loop it would hold up everybody. One thread is enough, and keeps
    memory small: Python runs no two at a time.
    """

    def __init__(self, settings: Settings, parser: Executor) -> None:
        self._settings = settings
        self._parser = parser
        self.held = 0  # bytes that are being received or parsed, of all requests

    async def read(self, parse: Callable[[bytes], Parsed]) -> Parsed:
        """What `parse` makes of the request's body.

        Only what says that it is JSON is taken: browsers send other types across origins without asking, which would
        let any web page use a server on its reader's own machine.

        Raises:
            ApiError: 415 for another type of content; 408 if the body takes longer than it may; 503 if there is no
                room for it; those of `parse`.
            RequestEntityTooLarge: For one that is larger than a body may be.
        """
        if not request.is_json or request.headers.get("Content-Encoding", "identity") != "identity":
            raise ApiError(415, "the body should be JSON, sent as 'Content-Type: application/json' and not compressed")
        chunks: list[bytes] = []
        try:
            await self._receive(chunks)
            body = b"".join(chunks)
            if len(body) <= SMALL_BODY:
                return parse(body)
            return await asyncio.get_running_loop().run_in_executor(self._parser, parse, body)
        finally:
            self.held -= sum(map(len, chunks))

    async def _receive(self, chunks: list[bytes]) -> None:
        """Adds what comes to `chunks`. Quart's own time limit uses `asyncio.wait_for`, which up to Python 3.11 loses a
        cancellation that arrives together with the body: the request of a client that hangs up at once would run to
        its end."""
        seconds, received = self._settings.body_timeout, 0
        try:
            async with asyncio.timeout(seconds or None):
                async for chunk in request.body:
                    chunks.append(chunk)
                    received += len(chunk)
                    self.held += len(chunk)
                    self._check(received)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {seconds:g} seconds") from None

    def _check(self, received: int) -> None:
        """Refuses a body that is too large: by itself, or beside the others. A small one has always room, so that a few
        large ones that never end keep nobody else out."""
        if 0 < self._settings.max_body_bytes < received:
            raise RequestEntityTooLarge
        room = self._settings.max_bodies_mb << 20
        if 0 < room < self.held and SMALL_BODY < received < self.held:
            message = f"the bodies of other requests take up {self._settings.max_bodies_mb} MB, which is the limit"
            raise ApiError(503, f"{message}; retry later", code="bodies_full", retry_after=1)


def read_fields(kind: type[Fields], body: bytes) -> Fields:
    """Reads a request body.

    Raises:
        ApiError: 400, with `param` naming the field.
    """
    return checked_fields(kind, parse_json(body))


def checked_fields(kind: type[Fields], values: dict[str, Any]) -> Fields:
    """The same for what has been read."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _explained(error) from None


def parse_json(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. NaN and Infinity are no JSON; a field comes once; nesting and values are limited."""
    if not body:
        raise bad_request("the body is empty; it should be a JSON object")
    if len(body) > MOST_VALUES and (marks := sum(body.count(mark) for mark in (b",", b":", b"[", b"{"))) > MOST_VALUES:
        raise bad_request(f"the body has {marks} commas, colons and opening brackets; it may have {MOST_VALUES}")
    try:
        text = body.decode("utf-8")
        values = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
        if re.search(r"\\u[dD][89a-fA-F]", text):
            json.dumps(values, ensure_ascii=False).encode("utf-8")  # refuses half a surrogate pair
    except RecursionError:
        raise bad_request(f"the body is nested deeper than {DEEPEST_NESTING} levels") from None
    except UnicodeEncodeError:
        raise bad_request("the body is not valid JSON in UTF-8: it has half a surrogate pair") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON in UTF-8: {error}") from None
    if not isinstance(values, dict):
        raise bad_request(f"the body should be a JSON object, found {type(values).__name__}")
    if deeper_than(values, DEEPEST_NESTING):
        raise bad_request(f"the body is nested deeper than {DEEPEST_NESTING} levels")
    return values


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _object(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(fields)
    if len(values) < len(fields):
        counts = Counter(name for name, _ in fields)
        repeated = next(name for name in values if counts[name] > 1)
        raise ValueError(f"the field {repeated!r:.40} is there twice")
    return values


def deeper_than(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in each other more than `levels` times."""
    if not isinstance(value, dict | list):
        return False
    if levels == 0:
        return True
    return any(deeper_than(entry, levels - 1) for entry in (value.values() if isinstance(value, dict) else value))


def _explained(error: ValidationError) -> ApiError:
    """The first thing that is wrong, named by its place in the request."""
    first = _most_telling(error.errors(include_url=False, include_context=False))
    param = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    found = "null" if first["input"] is None else repr(first["input"])
    shown = found if len(found) <= 80 else found[:77] + "..."
    if first["type"] == "missing":
        return bad_request(f"'{param}' is required", param)
    return bad_request(f"'{param}': {first['msg'].removeprefix('Value error, ').lower()}, found {shown}", param)


def _most_telling(errors: Sequence[Any]) -> Any:
    """The first error; where a field may have several types and the value has one of them, what is wrong with that."""
    first = errors[0]["loc"]
    if not first or not _is_branch(first[-1]):  # nowhere in particular, or in a field of one type
        return errors[0]
    inside = [each for each in errors if each["loc"][: len(first) - 1] == first[:-1]]
    typed = (each for each in inside if len(each["loc"]) > len(first) or not each["type"].endswith("_type"))
    return next(typed, errors[0])


def _is_branch(part: str | int) -> bool:
    """Whether a part of an error's place is no field but a type that the field may have."""
    return str(part).startswith(BRANCHES) or part in ("str", "float", "int")
