"""What the command line says."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models.cache import CACHE_TYPES
from models.quantisation import SCHEMES

API_KEY_VARIABLE = "KESTREL_API_KEY"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*,A-Z]+")


@dataclass(frozen=True)
class Settings:
    """The server's settings; `model_id` is the name that clients see."""

    model: str = "tiny-vl"
    weights: str | None = None
    quant: str | None = None
    kv: str | None = None
    copy_weights: bool = False
    dtype: str = "float32"
    model_id: str = "tiny-vl"
    host: str = "127.0.0.1"
    port: int = 8000
    max_queued: int = 16
    min_free_mb: int = 512
    backlog: int = 128
    max_connections: int = 256
    max_context: int | None = None
    max_image_tokens: int = 1280
    max_body_bytes: int = 32 * 2**20
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    idle_timeout: float = 75.0
    stall_timeout: float = 60.0
    drain_timeout: float = 30.0
    ping_seconds: float = 15.0
    kestrel_events: bool = False
    api_key: str | None = field(default=None, repr=False)
    allowed_origins: tuple[str, ...] = ()


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Reads the command line; ends the program with a message for what it does not know."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m serving",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Serves one model.",
    )
    parser.add_argument("--model", default=default.model, help="a checkpoint folder, tiny-vl, tiny-moe, or a preset")
    parser.add_argument("--weights", choices=["random"], help="random weights, for a preset")
    parser.add_argument("--quant", choices=sorted(SCHEMES), help="quantise the weights; without: as they are stored")
    parser.add_argument("--kv", choices=CACHE_TYPES, help="how keys and values are kept; int8 with quantised weights")
    parser.add_argument("--copy-weights", action="store_true", help="copy a converted folder's weights to huge pages")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default=default.dtype, help="how matrices are kept")
    parser.add_argument("--model-id", help="the name that clients see; by default the model's")
    parser.add_argument("--host", default=default.host, help="the address to listen on")
    parser.add_argument("--port", type=_port, default=default.port, help="0 takes a free one, which is printed")
    parser.add_argument(
        "--max-queued", type=_count, default=default.max_queued, help="waiting requests; 0 for no limit"
    )
    parser.add_argument(
        "--min-free-mb", type=_count, default=default.min_free_mb, help="MB of memory that a request needs; 0: any"
    )
    parser.add_argument("--backlog", type=_count, default=default.backlog, help="connections not yet accepted")
    parser.add_argument(
        "--max-connections", type=_count, default=default.max_connections, help="at the same time; 0 for no limit"
    )
    parser.add_argument("--max-context", type=int, help="tokens of prompt and answer together")
    parser.add_argument(
        "--max-image-tokens", type=int, default=default.max_image_tokens, help="tokens of one picture or one video"
    )
    parser.add_argument("--max-body-bytes", type=_count, default=default.max_body_bytes, help="size of a request")
    parser.add_argument(
        "--header-timeout", type=_seconds, default=default.header_timeout, help="seconds for a request's head; 0: any"
    )
    parser.add_argument(
        "--body-timeout", type=_seconds, default=default.body_timeout, help="seconds for a request's body; 0: any"
    )
    parser.add_argument(
        "--idle-timeout", type=_seconds, default=default.idle_timeout, help="seconds between requests; 0: any"
    )
    parser.add_argument(
        "--stall-timeout", type=_seconds, default=default.stall_timeout, help="seconds without reading; 0: any"
    )
    parser.add_argument("--drain-timeout", type=_seconds, default=default.drain_timeout, help="seconds at shutdown")
    parser.add_argument(
        "--ping-seconds", type=_seconds, default=default.ping_seconds, help="silence before a comment; 0: none"
    )
    parser.add_argument("--kestrel-events", action="store_true", help="send metrics and tokens frames in every stream")
    parser.add_argument("--api-key-file", help=f"a file with the key that clients must send; or {API_KEY_VARIABLE}")
    parser.add_argument(
        "--allowed-origin",
        type=_origin,
        action="append",
        default=[],
        dest="allowed_origins",
        help="a web page's origin, such as https://lab.example, that may use the server; repeatable",
    )
    values = vars(parser.parse_args(arguments))
    values["allowed_origins"] = tuple(values["allowed_origins"])
    try:
        values["api_key"] = _api_key(values.pop("api_key_file"))
    except OSError as error:
        parser.error(f"--api-key-file: {error}")
    except ValueError as error:
        parser.error(str(error))
    values["model_id"] = values["model_id"] or values["model"].rstrip("/").rsplit("/", 1)[-1]
    return Settings(**values)


def _api_key(file: str | None) -> str | None:
    """The key in `file`, or in the environment: on a command line any user of the machine could read it."""
    if file is None and API_KEY_VARIABLE not in os.environ:
        return None
    where = API_KEY_VARIABLE if file is None else f"--api-key-file {file}"
    key = os.environ[API_KEY_VARIABLE] if file is None else Path(file).read_text("latin-1").strip()
    if not re.fullmatch("[!-~]+", key):
        raise ValueError(f"{where}: an API key should be one line of printable ASCII characters without spaces")
    return key


def _origin(text: str) -> str:
    if not ORIGIN.fullmatch(text):
        raise argparse.ArgumentTypeError(f"should be like https://lab.example:8443, in lower case, found {text!r}")
    return text


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, found {value}")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"must lie in 0..65535, found {value}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 on, found {value}")
    return value
