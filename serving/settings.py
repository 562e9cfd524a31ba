"""What the command line says."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models.batch import BatchLimits
from models.cache import CACHE_TYPES
from models.inference import CHUNKS
from models.quantisation import SCHEMES

MOST_ROWS = 32  # up to which a row of a decode step does not depend on the others (`models.layers.DECODE_ROWS`)
MOST_KEPT = 16  # sequences that are kept for reuse, however small they are
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
    batch_max: int = 1
    prefill_budget: int = 256
    prefix_cache_mb: int = 512
    image_cache_mb: int = 128
    disk_kv: str | None = None
    disk_kv_mb: int = 4096
    spec_k: int = 0
    min_free_mb: int = 512
    backlog: int = 128
    max_connections: int = 256
    max_context: int | None = None
    max_image_tokens: int = 1280
    max_body_bytes: int = 32 * 2**20
    max_bodies_mb: int = 256
    header_timeout: float = 20.0
    body_timeout: float = 60.0
    idle_timeout: float = 75.0
    stall_timeout: float = 60.0
    drain_timeout: float = 30.0
    ping_seconds: float = 15.0
    kestrel_events: bool = False
    log_prompts: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()

    def batch_limits(self, bytes_per_slot: int) -> BatchLimits:
        """What the batch may take on, where the cache of a full context takes `bytes_per_slot`."""
        kept = min(MOST_KEPT, (self.prefix_cache_mb << 20) // bytes_per_slot)
        return BatchLimits(
            rows=self.batch_max,
            slots=self.batch_max + kept,
            prefill_budget=self.prefill_budget,
            image_cache_bytes=self.image_cache_mb << 20,
            reuse=self.prefix_cache_mb > 0,
            draft=self.spec_k,
            disk_folder=None if self.disk_kv is None else Path(self.disk_kv),
            disk_bytes=self.disk_kv_mb << 20,
        )


def parse_settings(arguments: Sequence[str] | None = None) -> Settings:
    """Reads the command line; ends the program with a message for what it does not know."""
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m serving",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        description="Serves one model.",
        allow_abbrev=False,  # `--api-key SECRET` would be taken for a file's name, and told in the error
    )
    parser.add_argument("--model", default=default.model, help="a checkpoint folder, tiny-vl, tiny-moe, or a preset")
    parser.add_argument("--weights", choices=["random"], help="random weights; a preset has no others")
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
        "--batch-max", type=_rows, default=default.batch_max, help="requests computed together; 1: one after the other"
    )
    parser.add_argument(
        "--prefill-budget",
        type=_budget,
        default=default.prefill_budget,
        help="tokens of prompts that are computed between two tokens of running requests",
    )
    parser.add_argument(
        "--prefix-cache-mb",
        type=_count,
        default=default.prefix_cache_mb,
        help="MB for what ended requests have computed, so that prompts that begin alike need not be computed again",
    )
    parser.add_argument(
        "--image-cache-mb", type=_count, default=default.image_cache_mb, help="MB for pictures that have been encoded"
    )
    parser.add_argument(
        "--disk-kv",
        metavar="DIR",
        help="a folder that keeps what requests have computed, so that after a restart it need not be computed again",
    )
    parser.add_argument("--disk-kv-mb", type=_count, default=default.disk_kv_mb, help="MB for the files in that folder")
    parser.add_argument(
        "--spec-k",
        type=_count,
        default=default.spec_k,
        help="tokens that a greedy request guesses from its own text and checks in one step; the answer is the same",
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
        "--max-bodies-mb",
        type=_count,
        default=default.max_bodies_mb,
        help="MB of bodies that are being taken in, of all requests together; 0 for no limit",
    )
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
    parser.add_argument("--log-prompts", action="store_true", help="write the text of prompts and answers to the log")
    parser.add_argument(
        "--api-key-file", help=f"a file with the keys that clients may send, one per line; or {API_KEY_VARIABLE}"
    )
    parser.add_argument(
        "--allowed-origin",
        type=_origin,
        action="append",
        default=[],
        dest="allowed_origins",
        help="a web page's origin, such as https://lab.example, that may use the server; repeatable",
    )
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        dest="allowed_hosts",
        metavar="NAME",
        help="a name under which clients reach the server where no key is asked for; repeatable",
    )
    values = vars(parser.parse_args(arguments))
    values["allowed_hosts"] = tuple(values["allowed_hosts"])
    values["allowed_origins"] = tuple(values["allowed_origins"])
    try:
        values["api_keys"] = _api_keys(values.pop("api_key_file"))
    except OSError as error:
        parser.error(f"--api-key-file: {error}")
    except ValueError as error:
        parser.error(str(error))
    if values["disk_kv"] is not None and not values["prefix_cache_mb"]:
        parser.error("--disk-kv keeps what --prefix-cache-mb would keep; give that more than 0")
    values["model_id"] = values["model_id"] or values["model"].rstrip("/").rsplit("/", 1)[-1]
    return Settings(**values)


def _api_keys(file: str | None) -> tuple[str, ...]:
    """The keys in `file`, one per line, or the one in the environment: on a command line any user of the machine could
    read them."""
    if file is None and API_KEY_VARIABLE not in os.environ:
        return ()
    where = API_KEY_VARIABLE if file is None else f"--api-key-file {file}"
    text = os.environ[API_KEY_VARIABLE] if file is None else Path(file).read_text("latin-1")
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys or not all(re.fullmatch("[!-~]+", key) for key in keys):
        raise ValueError(f"{where}: an API key should be a line of printable ASCII characters without spaces")
    return keys


def _origin(text: str) -> str:
    if not ORIGIN.fullmatch(text):
        raise argparse.ArgumentTypeError(f"should be like https://lab.example:8443, in lower case, found {text!r}")
    return text


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, found {value}")
    return value


def _rows(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MOST_ROWS:
        raise argparse.ArgumentTypeError(f"must lie in 1..{MOST_ROWS}, found {value}")
    return value


def _budget(text: str) -> int:
    value = int(text)
    if value < CHUNKS[0]:
        raise argparse.ArgumentTypeError(f"must be at least {CHUNKS[0]}, found {value}")
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
