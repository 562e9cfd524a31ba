"""/admin: what the server is doing, and how to end it."""

from __future__ import annotations

import asyncio
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quart import Blueprint, Response, jsonify, request

from models import LoadedModel
from models.kernels.loader import active_variant
from serving.access import Access
from serving.engine import Engine
from serving.memory import available_bytes, resident_bytes
from serving.settings import Settings

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def project_version() -> str:
    """The version of this program."""
    return tomllib.loads(PROJECT.read_text())["project"]["version"]


def admin_routes(engine: Engine, settings: Settings, access: Access) -> Blueprint:
    """The routes around an engine; the time of the call is what uptime counts from."""
    blueprint = Blueprint("admin", __name__, url_prefix="/admin")
    version = project_version()
    started = time.monotonic()

    @blueprint.before_request
    async def check() -> None:
        access.check_administrator(request)

    @blueprint.get("/status")
    async def status() -> Response:
        """Everything an operator wants to see at a glance."""
        # The library is loaded with the model; to ask earlier would be to load it here.
        kernels = await asyncio.to_thread(active_variant) or "reference" if engine.model else None
        return jsonify(
            {
                "status": engine.state,
                "problem": engine.problem or None,
                "version": version,
                "uptime_s": round(time.monotonic() - started, 1),
                "model": settings.model_id,
                "kernels": kernels,
                "counters": engine.counts(),
                "memory": {"resident_mb": resident_bytes() >> 20, "available_mb": available_bytes() >> 20},
                "settings": _shown(settings, engine.model),
            }
        )

    @blueprint.post("/shutdown")
    async def shutdown() -> tuple[Response, int]:
        """Does what SIGTERM does."""
        engine.asked_to_stop.set()
        active, queued = engine.places
        return jsonify({"status": "draining", "active": active, "queued": queued}), 202

    return blueprint


def _shown(settings: Settings, model: LoadedModel | None) -> dict[str, Any]:
    """The settings, with the number of keys instead of the keys; what was left to the model, as it chose."""
    chosen = {} if model is None else {"kv": model.cache_type, "max_context": model.max_context}
    return asdict(settings) | {"api_keys": len(settings.api_keys)} | chosen
