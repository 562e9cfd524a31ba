"""nginx in front of a server, for experiments about what a proxy does to a stream."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from experiments.server_process import Server

HOST = "127.0.0.1"
STARTING_SECONDS = 10
OTHER_PROXIES = ("fastcgi", "uwsgi", "scgi")  # have folders for temporary files too, which nginx makes at the start
CONFIGURATION = """\
daemon off;
master_process off;
pid nginx.pid;
error_log error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path body_files;
    proxy_temp_path proxy_files;
    {folders}
    {servers}
}}
"""
# The body is not cut into chunks of HTTP, because the clients of the experiments read lines.
SERVER = """server {{
        listen {host}:{port};
        chunked_transfer_encoding off;
        location / {{
            proxy_pass http://{upstream.host}:{upstream.port};
            {directives}
        }}
    }}"""


@dataclass(frozen=True)
class Route:
    """What stands behind one port of nginx, and the directives that its `location` has besides `proxy_pass`."""

    upstream: Server
    directives: tuple[str, ...] = ()


def find_nginx() -> str | None:
    """nginx's program, or None. Some systems keep it where only root's PATH leads."""
    folders = (os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin")
    return shutil.which("nginx", path=os.pathsep.join(folders))


def nginx_version(program: str) -> str:
    """Such as "nginx/1.22.1"."""
    return _told(program, "-v").rsplit(": ", 1)[-1].strip()


def _told(program: str, option: str) -> str:
    return subprocess.run([program, option], capture_output=True, text=True, check=True).stderr


@contextmanager
def running_nginx(program: str, routes: Sequence[Route]) -> Iterator[list[Server]]:
    """One nginx process with a port for each route; everything that is not said in `routes` is as nginx has it by
    default.

    Raises:
        RuntimeError: it did not start.
    """
    with tempfile.TemporaryDirectory(prefix="nginx_") as name:
        folder, ports = Path(name), _free_ports(len(routes))
        (folder / "nginx.conf").write_text(_configuration(program, routes, ports))
        command = [program, "-p", name, "-c", "nginx.conf", "-e", "error.log"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            for port in ports:
                _wait_for(port, process, folder / "error.log")
            yield [Server(HOST, port, process.pid) for port in ports]
        finally:
            process.terminate()
            process.wait()


def _configuration(program: str, routes: Sequence[Route], ports: Sequence[int]) -> str:
    built = _told(program, "-V")
    folders = [
        f"{name}_temp_path {name}_files;" for name in OTHER_PROXIES if f"--without-http_{name}_module" not in built
    ]
    servers = [
        SERVER.format(host=HOST, port=port, upstream=route.upstream, directives="\n            ".join(route.directives))
        for route, port in zip(routes, ports, strict=True)
    ]
    return CONFIGURATION.format(folders="\n    ".join(folders), servers="\n    ".join(servers))


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; nginx cannot be asked to choose them itself."""
    with ExitStack() as stack:
        bound = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in bound]


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTING_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError(f"nginx did not start: {log.read_text() if log.is_file() else 'it says nothing'}")
