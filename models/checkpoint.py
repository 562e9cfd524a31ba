"""Hugging Face checkpoint folders: `config.json` and safetensors files, checked in full before a weight is read.

The safetensors format (https://huggingface.co/docs/safetensors): 8 bytes with the length of the header, a JSON header
that gives every tensor's dtype, shape and byte range, then the data, without holes. The header is read here rather than
through the safetensors package because that one copies into numpy, and because a refusal should name file and tensor.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from models.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
LFS_MARK = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `start` is its first byte, counted from the beginning of `file`."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose files were found complete and consistent. Only headers have been read.

    `config` is the content of `config.json`. Make one with `Checkpoint.open`.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Reads `config.json` and the header of `model.safetensors`, or of every shard the index names.

        Where a folder has both, the single file counts, as in transformers. Raises CheckpointError, naming the file and
        the tensor, for anything that is missing, cut off, inconsistent or of a dtype that cannot be read.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: no such folder; a checkpoint is a folder with config.json and {SINGLE_FILE}"
            )
        config = read_json_object(folder / "config.json")
        if (folder / SINGLE_FILE).is_file():
            tensors = read_header(folder / SINGLE_FILE)
        elif (folder / INDEX_FILE).is_file():
            tensors = read_shards(folder)
        else:
            raise CheckpointError(
                f"{folder}: no weights; there should be a {SINGLE_FILE} or a {INDEX_FILE} with its shards"
            )
        return cls(folder, config, tensors)

    @property
    def identity(self) -> str:
        """What tells these weights from others without reading them: their files' names, sizes and times of change."""
        found = [(file.name, file.stat()) for file in sorted({stored.file for stored in self.tensors.values()})]
        return repr([(name, status.st_size, status.st_mtime_ns) for name, status in found])

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def file(self, name: str) -> Path:
        return self._stored(name).file

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> np.dtype:
        return self._stored(name).dtype

    def read(self, name: str) -> np.ndarray:
        """The tensor as a read-only view of the file. Its pages are released with the array, so that a reader that goes
        tensor by tensor never holds more than one."""
        stored = self._stored(name)
        if 0 in stored.shape:
            return np.zeros(stored.shape, stored.dtype)  # nothing to map
        return np.memmap(stored.file, stored.dtype, mode="r", offset=stored.start, shape=stored.shape)

    def _stored(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is in none of the checkpoint's files")
        return self.tensors[name]


def read_shards(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the shards that the index names; index and shards must agree on which tensor is where."""
    shard_of = read_index(folder / INDEX_FILE)
    tensors: dict[str, StoredTensor] = {}
    first_of: dict[str, str] = {}
    for name, shard in shard_of.items():
        first_of.setdefault(shard, name)
    for shard, first in sorted(first_of.items()):
        for name, stored in read_header(folder / shard, first).items():
            if name in tensors:
                raise CheckpointError(
                    f"{stored.file}: tensor {name!r} is also in {tensors[name].file.name}; one is too many"
                )
            tensors[name] = stored
    for name, stored in tensors.items():
        if name not in shard_of:
            raise CheckpointError(
                f"{stored.file}: tensor {name!r} is not named by {INDEX_FILE}; are they of one checkpoint?"
            )
    for name, shard in shard_of.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise CheckpointError(
                f"{folder / shard}: tensor {name!r} is not in this file, where {INDEX_FILE} says it is"
            )
    return tensors


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name of its shard."""
    shard_of = read_json_object(path).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise CheckpointError(f"{path}: 'weight_map' should be an object that gives every tensor's shard")
    for name, shard in shard_of.items():
        if not isinstance(shard, str) or not is_plain_file_name(shard):
            raise CheckpointError(
                f"{path}: the shard of tensor {name!r} is {shard!r}, which is not the name of a file here"
            )
    return shard_of


def is_plain_file_name(name: str) -> bool:
    """Whether the name stays in its folder: an index is foreign data and must not reach other files."""
    return name not in ("", ".", "..") and name.isprintable() and not any(slash in name for slash in "/\\")


def read_header(path: Path, expected: str | None = None) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file, whose header must describe every byte of it exactly once. `expected` is a
    tensor that an index promises there: a refusal of the whole file names it."""
    try:
        header, data_start, size = read_header_object(path)
    except CheckpointError as error:
        if expected is None:
            raise
        raise CheckpointError(f"{error}; {INDEX_FILE} expects tensor {expected!r} in it") from error
    header.pop("__metadata__", None)
    ranges = {name: byte_range(path, name, entry) for name, entry in header.items()}
    check_layout(path, ranges, size - data_start)
    return {name: stored_tensor(path, name, header[name], ranges[name], data_start) for name in header}


def read_header_object(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header of a safetensors file, where its data starts, and the size of the file."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(0)
            length = header_length(path, stream.read(max(LENGTH_BYTES, len(LFS_MARK))), size)
            stream.seek(LENGTH_BYTES)
            header = parse_json_object(path, stream.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); the checkpoint needs this file") from error
    return header, LENGTH_BYTES + length, size


def header_length(path: Path, beginning: bytes, size: int) -> int:
    refuse_lfs_pointer(path, beginning)
    if size < LENGTH_BYTES:
        raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file; is the download complete?")
    length = int.from_bytes(beginning[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path}: not a safetensors file: its first 8 bytes give a header of {length} bytes")
    if LENGTH_BYTES + length > size:
        raise CheckpointError(
            f"{path}: cut off within its header: {size} bytes instead of at least {LENGTH_BYTES + length}; "
            "download it again"
        )
    return length


def byte_range(path: Path, name: str, entry: Any) -> tuple[int, int]:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not is_list_of_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{path}: tensor {name!r}: data_offsets should be [begin, end], found {offsets!r}")
    return offsets[0], offsets[1]


def check_layout(path: Path, ranges: dict[str, tuple[int, int]], data_size: int) -> None:
    """Refuses overlaps, holes, missing bytes and bytes that belong to no tensor."""
    position = 0
    for name, (begin, end) in sorted(ranges.items(), key=lambda item: item[1]):
        if begin != position:
            fault = "overlaps the tensor before it" if begin < position else "leaves a hole before it"
            raise CheckpointError(f"{path}: tensor {name!r} {fault}: it begins at byte {begin} instead of {position}")
        if end > data_size:
            raise CheckpointError(
                f"{path}: cut off: tensor {name!r} ends at byte {end} of the data, of which there are {data_size}; "
                "download it again"
            )
        position = end
    if position < data_size:
        raise CheckpointError(f"{path}: {data_size - position} bytes after the last tensor belong to no tensor")


def stored_tensor(path: Path, name: str, entry: dict, byte_range: tuple[int, int], data_start: int) -> StoredTensor:
    shape = entry.get("shape")
    if not is_list_of_sizes(shape):
        raise CheckpointError(f"{path}: tensor {name!r}: shape should be a list of sizes, found {shape!r}")
    dtype = readable_dtype(path, name, entry.get("dtype"))
    begin, end = byte_range
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: tensor {name!r}: data_offsets give {end - begin} bytes, which is not shape {shape} of {dtype}"
        )
    return StoredTensor(path, dtype, tuple(shape), data_start + begin)


def readable_dtype(path: Path, name: str, dtype: Any) -> np.dtype:
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    advice = f"known are {', '.join(DTYPES)}"
    if isinstance(dtype, str) and dtype.startswith("F8_"):
        advice = "FP8 checkpoints need dequantised weights: use the bfloat16 release of the model"
    raise CheckpointError(f"{path}: tensor {name!r}: dtype {dtype!r} cannot be read; {advice}")


def is_list_of_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def read_json_object(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object. Raises CheckpointError if it is missing or anything else."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}); the checkpoint needs this file") from error
    refuse_lfs_pointer(path, text)
    return parse_json_object(path, text)


def parse_json_object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: unique_keys(path, pairs))
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: bad syntax, bad UTF-8, endless numbers
        raise CheckpointError(f"{path}: broken JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: should hold a JSON object, found a {type(value).__name__}")
    return value


def unique_keys(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{path}: {twice!r} appears twice in one JSON object")
    return entries


def refuse_lfs_pointer(path: Path, beginning: bytes) -> None:
    if beginning.startswith(LFS_MARK):
        raise CheckpointError(
            f"{path}: a Git LFS pointer, not the file itself; run `git lfs pull` in {path.parent} or download the file"
        )
