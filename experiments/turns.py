"""Programs that are measured in turns: each in a long-lived process of its own, pinned to the same few cores, the
fastest ones where cores differ.

A process keeps its weights from turn to turn; while another has its turn, it waits and uses no core.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_subject: Any = None  # in a subject's process: the object that lives there


class Subject:
    """An object in a process of its own; its methods are called there, one at a time."""

    def __init__(self, threads: int, make: Callable[..., Any], *arguments: Any) -> None:
        """Starts the process on the fastest `threads` cores and makes the object there: `make(*arguments)`.

        Raises:
            whatever `make` raises; BrokenProcessPool if the process dies, such as for want of memory.
        """
        self._process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        try:
            with pinned(threads):  # the process inherits it, before XLA counts the cores
                made = self._process.submit(_make, make, arguments)
            made.result()
        except BaseException:
            self.close()
            raise

    def call(self, method: str, *arguments: Any) -> Any:
        """What the object's method returns."""
        return self._process.submit(_call, method, arguments).result()

    def close(self) -> None:
        """Ends the process."""
        self._process.shutdown(cancel_futures=True)

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Restricts this thread, and the processes that it starts meanwhile, to the fastest `threads` of its cores, the
    first among equals."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores, key=lambda core: (-capacity(core), core))[:threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def capacity(core: int) -> int:
    """How fast a core is beside the others, as the kernel tells it of boards whose cores differ; 0 if it does not."""
    file = Path(f"/sys/devices/system/cpu/cpu{core}/cpu_capacity")
    return int(file.read_text()) if file.is_file() else 0


def _make(make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _subject
    _subject = make(*arguments)


def _call(method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(_subject, method)(*arguments)
