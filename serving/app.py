"""The routes, and one shape for every error."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quart import Quart, Response, g, jsonify, request
from werkzeug.exceptions import HTTPException

from serving import demo_page, messages, openapi, request_log
from serving.access import Access
from serving.admin import admin_routes
from serving.engine import Engine
from serving.errors import ApiError
from serving.metrics import CONTENT_TYPE
from serving.model_routes import check_model, model_routes
from serving.settings import Settings

log = logging.getLogger("kestrel.http")
PREPARING_THREADS = 2  # template, tokenizer and picture decoding; more would only take cores from the engine


def create_app(engine: Engine, settings: Settings) -> Quart:
    """The application around an engine."""
    app = Quart("serving", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = settings.max_body_bytes or None
    app.config["BODY_TIMEOUT"] = None  # see `json_body.Bodies`
    app.config["RESPONSE_TIMEOUT"] = None  # a slow reader may take long; one that takes nothing is cut off elsewhere
    app.json.sort_keys = False
    app.url_map.merge_slashes = False  # a redirect would be the only answer that is not JSON
    app.register_blueprint(demo_page.blueprint)
    workers = ThreadPoolExecutor(PREPARING_THREADS, thread_name_prefix="prepare")
    parser = ThreadPoolExecutor(1, thread_name_prefix="parse")
    access = Access(settings)
    served = {"id": settings.model_id, "object": "model", "created": int(time.time()), "owned_by": "kestrel-jax"}

    @app.while_serving
    async def run() -> AsyncIterator[None]:
        engine.start()
        lag = asyncio.create_task(engine.metrics.measure_lag())
        yield
        lag.cancel()
        engine.stop()
        for threads in (workers, parser):
            threads.shutdown(wait=False, cancel_futures=True)

    @app.before_request
    async def begin_record() -> None:
        record = request_log.begin(request.method, request.path)

        def end(task: asyncio.Task[None]) -> None:
            for job in record.jobs:
                job.cancel()  # first, since to write the line takes time, in which tokens would be computed for nobody
            outcome = request_log.end(record, task)
            if outcome != "finished" and not record.quiet and not record.completed:
                engine.metrics.unfinished(outcome)

        asyncio.current_task().add_done_callback(end)

    @app.before_request
    async def check_access() -> Response | None:
        g.owner = access.key_of(request)
        return access.check(request, g.owner)

    @app.after_request
    async def complete(response: Response) -> Response:
        access.mark(request, response)
        request_log.current().status = response.status_code
        if messages.is_anthropic(request.path) and (name := messages.request_id()):
            response.headers["Request-Id"] = name
        return response

    @app.get("/health")
    async def health() -> tuple[Response, int]:
        """Whether requests are taken, and what is under way."""
        active, queued = engine.places
        state = {
            "status": engine.state,
            "model": settings.model_id,
            "busy": active > 0,
            "queued": queued,
            "active": active,
            "total_requests": engine.total_requests,
            "max_seq": engine.model.max_context if engine.model else 0,
            "max_queued": engine.max_queued,
            "slots": engine.slots(),
        }
        if settings.disk_kv is not None:
            state["disk_cache"] = engine.disk()
        return jsonify(state), 200 if engine.state == "ok" else 503

    @app.get("/metrics")
    async def metrics() -> Response:
        """What happens inside, for Prometheus."""
        return Response(engine.metrics.exposition(), content_type=CONTENT_TYPE)

    @app.get("/v1/models")
    async def models() -> Response:
        """The one model that is served, in a list."""
        return jsonify({"object": "list", "data": [served]})

    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        """The same, asked for by its name."""
        check_model(name, settings)
        return jsonify(served)

    @app.get("/openapi.json")
    async def api_document() -> Response:
        """What may be asked, and what is answered, for programs."""
        return jsonify(openapi.document(settings))

    app.register_blueprint(model_routes(engine, settings, workers, parser))
    app.register_blueprint(admin_routes(engine, settings, access))

    @app.errorhandler(ApiError)
    async def api_error(error: ApiError) -> Response:
        return _error_response(error)

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        """Quart's own refusals: unknown path, wrong method, body too large or too slow."""
        status = error.code or 500
        return _error_response(ApiError(status, _plain(error, settings), code=None), error.get_headers())

    @app.errorhandler(Exception)
    async def unexpected(error: Exception) -> Response:
        log.exception("%s %s failed", request.method, request.path, exc_info=error)
        return _error_response(ApiError(500, "the server failed on this request", code="internal_error"))

    return app


def _plain(error: HTTPException, settings: Settings) -> str:
    if error.code == 413:
        return f"the body is larger than {settings.max_body_bytes} bytes"
    if error.code in (404, 405):
        return f"there is no {request.method} {request.path}"
    return str(error.description or error.name)


def _error_response(error: ApiError, headers: list[tuple[str, str]] | None = None) -> Response:
    request_log.current().code = error.code
    response = jsonify(messages.error_body(error) if messages.is_anthropic(request.path) else error.body)
    response.status_code = error.status
    kept: dict[str, Any] = {name: value for name, value in headers or [] if name.lower() == "allow"}
    if error.retry_after is not None:
        kept["Retry-After"] = str(error.retry_after)
    if error.status == 500:
        kept["x-should-retry"] = "false"  # OpenAI's clients would have the same failure computed three times
    if error.status == 401:
        kept["WWW-Authenticate"] = "Bearer"
    response.headers.update(kept)
    return response
