"""Keys and values of earlier sequences in files, for prompts that begin alike after the program has been restarted.

A file holds one block: a stretch of a sequence's tokens, in all layers. It is named by a keyed hash of these tokens and
of the name of the block before it; what comes before the first one is the owner and a fingerprint of everything else
that the bits depend on. So a prompt's blocks are found by their names, sequences that begin alike have the same ones,
another model or owner has none of them, and no file is ever changed. Neither tokens nor owners are written.

The folder also keeps the secret of its hashes. Its files are private to the user who runs the program, because prompts
could be computed back from keys and values.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import queue
import re
import secrets
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from models.cache import CacheType, LayerCache
from models.config import ModelConfig
from models.errors import ConfigError
from models.inference import Chunk, capacity_for, plan_chunks
from models.kernels.loader import active_variant, library_hash
from models.slots import LEAST_REUSED, Slot
from models.switches import Switches

log = logging.getLogger("kestrel.disk_cache")

LEAST_KEPT = 64  # tokens; a shorter sequence is not worth a file
BACKLOG = 128 << 20  # bytes that may wait to be written
OVERHEAD = 1024  # bytes of a file beside its numbers, at most
SECRET_FILE, SECRET_BYTES = "secret", 32
BLOCK_FILE = re.compile(r"([0-9a-f]{64})\.safetensors")
UNFINISHED, ABANDONED_SECONDS = ".part", 3600.0  # a file that is being written, and when nobody can be at it any more
ARRAYS = ("keys", "values", "key_scales", "value_scales")
DIGEST = "digest"


@dataclass(frozen=True)
class Block:
    """A stretch of a sequence, without padding, and the name of its file."""

    name: str
    chunk: Chunk

    @property
    def end(self) -> int:
        """The tokens up to its end."""
        return self.chunk.start + self.chunk.tokens


def fingerprint(config: ModelConfig, switches: Switches, cache_type: CacheType, weights: str, context: int) -> str:
    """What the bits of keys and values depend on, besides tokens and pictures: the model (`weights` tells its weights
    and how they are kept), this program, and what it computes with."""
    variant = active_variant()
    # Plain JAX sums over the whole capacity of the cache.
    kernels = ("reference", capacity_for(context)) if variant is None else (variant, library_hash())
    machine = (jax.__version__, jax.lib.__version__, os.environ.get("XLA_FLAGS"), _processor())
    parts = (config, switches, cache_type, weights, _program(), kernels, machine)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@cache  # what runs is what was there at the start
def _program() -> str:
    """A hash of the source of this package: any change in it may be one of the arithmetic."""
    program = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        program.update(file.read_bytes())
    return program.hexdigest()


def _processor() -> str:
    """What XLA chooses its instructions by, as far as the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return platform.machine()


def open_folder(folder: Path) -> bytes:
    """Makes the folder, unless it is there, for its owner only; its secret.

    Raises:
        ConfigError: it cannot be used, or others may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_mode & 0o022:
            raise ConfigError(f"{folder}: others may write to this folder, but it is to hold prompts; chmod 700 it")
        file = folder / SECRET_FILE
        if not file.is_file() or file.stat().st_size != SECRET_BYTES:
            _write_whole(file, secrets.token_bytes(SECRET_BYTES))
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{folder}: keys and values cannot be kept there ({error.strerror})") from None


def _write_whole(file: Path, content: bytes) -> None:
    """Writes a private file whole or not at all."""
    descriptor, unfinished = tempfile.mkstemp(suffix=UNFINISHED, dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        os.replace(unfinished, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


class DiskCache:
    """The blocks in a folder, of which it knows the names; those used longest ago are removed first, whatever model or
    owner they are of. One thread calls its methods; writing and removing is done on another one, in order."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        fingerprint: str,
        shapes: LayerCache,
        *,
        row_by_row: bool,
        largest_chunk: int,
    ) -> None:
        """`shapes` are those of a block with the most tokens. `row_by_row` and `largest_chunk` as for a `SlotTable`:
        blocks are cut anywhere, or they are the chunks in which prompts are computed.

        Raises:
            ConfigError: the folder cannot be used.
        """
        self._folder = folder
        self._secret = open_folder(folder)
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._shapes = shapes
        self._row_by_row = row_by_row
        self._largest_chunk = largest_chunk
        self._sizes = (shapes.keys.shape[2], LEAST_REUSED)  # tokens of blocks that are cut anywhere
        block_bytes = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(shapes))
        self._most_waiting = max(1, BACKLOG // block_bytes)
        self.queries = 0  # prompts that were looked up
        self.hits = 0  # those that began with more than the cache in memory had
        self.read_tokens = 0
        self._files: OrderedDict[str, int] = OrderedDict()  # bytes by name, the one used longest ago first
        self._bytes = 0
        self._waiting: dict[str, dict[str, np.ndarray]] = {}  # what is not written yet, by name
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._troubles: set[str | None] = set()
        self._look_around()
        self._writer = threading.Thread(target=self._work, name="disk cache", daemon=True)
        self._writer.start()
        self._make_room()

    @property
    def files(self) -> int:
        """Blocks that are kept."""
        return len(self._files)

    @property
    def nbytes(self) -> int:
        """What their files take."""
        return self._bytes

    def find(self, keys: np.ndarray, owner: str, held: int) -> list[Block]:
        """The blocks with which a prompt, `keys` `[length]`, goes on after the `held` tokens that need not be read."""
        found = list(self._known(keys, owner))
        self._touch(found)
        self.queries += 1
        if not found or found[-1].end < held + LEAST_REUSED:
            return []
        self.hits += 1
        return [block for block in found if block.end > held]

    def read(self, block: Block) -> LayerCache | None:
        """The keys and values of a block, with padding; None if its file is gone or damaged."""
        arrays = self._waiting.get(block.name) or self._load(block)
        if arrays is None:
            return None
        self.read_tokens += block.chunk.tokens
        shapes, structure = jax.tree.flatten(self._shapes)
        padded = [np.zeros(shape.shape, shape.dtype) for shape in shapes]
        for target, name in zip(padded, ARRAYS, strict=False):
            target[:, :, : block.chunk.tokens] = arrays[name].view(target.dtype)
        return jax.tree.unflatten(structure, padded)

    def store(self, slot: Slot, read: Callable[[int], LayerCache], *, ended: bool = False) -> None:
        """Keeps what a slot holds, as far as that is not kept yet; the last few tokens only when its sequence has
        `ended`. `read` gives the block of the cache that begins at a token. When too much waits to be written, the rest
        is left out."""
        if slot.held < LEAST_KEPT:
            return
        blocks = self._cut(slot, ended)
        for block in blocks:
            if block.name not in self._files:
                if len(self._waiting) >= self._most_waiting:
                    break
                self._put(block, read(block.chunk.start))
        if ended:
            self._touch(blocks)

    def close(self, seconds: float | None = None) -> None:
        """Waits until everything is written, at most for so long. Nothing may be called after it."""
        self._tasks.put(None)
        self._writer.join(seconds)

    # Which blocks there are

    def _root(self, owner: str) -> str:
        """What stands before the first block of every sequence."""
        return self._hash(f"{self._fingerprint}/{owner}".encode())

    def _block(self, before: str, keys: np.ndarray, start: int, tokens: int) -> Block:
        name = self._hash(bytes.fromhex(before) + keys[start : start + tokens].astype("<i8").tobytes())
        return Block(name, Chunk(start, tokens, tokens))

    def _hash(self, content: bytes) -> str:
        return hashlib.blake2b(content, key=self._secret, digest_size=32).hexdigest()

    def _known(self, keys: np.ndarray, owner: str) -> Iterator[Block]:
        """The kept blocks with which a prompt begins. They do not include its last token, from which the answer
        follows."""
        sizes, before, place = self._sizes_at(len(keys)), self._root(owner), 0
        while True:
            fitting = (self._block(before, keys, place, size) for size in sizes(place) if place + size < len(keys))
            block = next((block for block in fitting if block.name in self._files), None)
            if block is None:
                return
            yield block
            before, place = block.name, block.end

    def _sizes_at(self, length: int) -> Callable[[int], Sequence[int]]:
        """How many tokens a block of a prompt may have, the most first, by the place where it begins."""
        if self._row_by_row:
            return lambda place: self._sizes
        plan = plan_chunks(length, 0, self._largest_chunk)
        whole = {chunk.start: (chunk.tokens,) for chunk in plan if chunk.tokens == chunk.bucket}
        return lambda place: whole.get(place, ())

    def _cut(self, slot: Slot, ended: bool) -> list[Block]:
        """The blocks of what a slot holds."""
        if self._row_by_row:
            largest, least = self._sizes
            whole = slot.held // largest * largest
            places = [(start, largest) for start in range(0, whole, largest)]
            if ended:
                places += [(start, least) for start in range(whole, slot.held - least + 1, least)]
        else:
            places = [(chunk.start, chunk.tokens) for chunk in slot.chunks]
        blocks, before = [], self._root(slot.owner)
        for start, tokens in places:
            blocks.append(self._block(before, slot.keys, start, tokens))
            before = blocks[-1].name
        return blocks

    # What is kept

    def _look_around(self) -> None:
        """Finds the blocks that are in the folder; removes what was left unfinished long ago."""
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                name = BLOCK_FILE.fullmatch(entry.name)
                with contextlib.suppress(OSError):  # another program may remove files at any time
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if name:
                        found.append((status.st_mtime_ns, name[1], status.st_size))
                    elif entry.name.endswith(UNFINISHED) and status.st_mtime < time.time() - ABANDONED_SECONDS:
                        os.unlink(entry.path)
        self._files.update((name, size) for _, name, size in sorted(found))
        self._bytes = sum(self._files.values())

    def _put(self, block: Block, kept: LayerCache) -> None:
        arrays = {
            name: array[:, :, : block.chunk.tokens].view(f"u{array.dtype.itemsize}")
            for name, array in zip(ARRAYS, jax.tree.leaves(kept), strict=False)
        }
        size = OVERHEAD + sum(array.nbytes for array in arrays.values())
        if size > self._max_bytes:
            return
        self._files[block.name] = size
        self._bytes += size
        self._waiting[block.name] = arrays
        self._tasks.put(partial(self._write, block.name, arrays))
        self._make_room()

    def _make_room(self) -> None:
        while self._bytes > self._max_bytes:
            self._forget(next(iter(self._files)))

    def _forget(self, name: str) -> None:
        """Removes a block."""
        self._bytes -= self._files.pop(name, 0)
        self._tasks.put(partial(self._file(name).unlink, missing_ok=True))

    def _touch(self, blocks: Sequence[Block]) -> None:
        """Counts blocks of one sequence as used now, the first one last: without it the others are of no use."""
        names = [block.name for block in reversed(blocks) if block.name in self._files]
        for name in names:
            self._files.move_to_end(name)
        if names:
            self._tasks.put(partial(self._mark, names))

    # Files

    def _file(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"

    def _load(self, block: Block) -> dict[str, np.ndarray] | None:
        """What the file of a block holds; None, and the block is forgotten, if that cannot be used."""
        file = self._file(block.name)
        try:
            arrays = load(file.read_bytes())
            if arrays.pop(DIGEST).tobytes() != _digest(block.name, arrays):
                raise ValueError("it does not hold what was written")
        except FileNotFoundError:
            pass  # removed by another program, which may have needed the room
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            log.warning("%s cannot be used and is removed: %s", file, error)
        else:
            return arrays
        self._forget(block.name)
        return None

    def _work(self) -> None:
        """Writes and removes, on a thread of its own, until there is nothing more to come."""
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except OSError as error:
                if error.strerror not in self._troubles:  # a full disk need not be told block by block
                    log.warning("%s: %s; what cannot be kept there is computed again", self._folder, error.strerror)
                    self._troubles.add(error.strerror)

    def _write(self, name: str, arrays: dict[str, np.ndarray]) -> None:
        try:
            whole = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
            digest = np.frombuffer(_digest(name, whole), np.uint8)
            _write_whole(self._file(name), save(whole | {DIGEST: digest}))
        finally:
            self._waiting.pop(name, None)

    def _mark(self, names: Sequence[str]) -> None:
        """Keeps the order of use, for the next start."""
        for name in names:
            now = time.time_ns()
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._file(name), ns=(now, now))


def _digest(name: str, arrays: dict[str, np.ndarray]) -> bytes:
    """A hash of what a file holds, and of what it is named."""
    digest = hashlib.blake2b(key=bytes.fromhex(name), digest_size=32)
    for key, array in sorted(arrays.items()):
        digest.update(repr((key, array.dtype.str, array.shape)).encode())
        digest.update(array)
    return digest.digest()
