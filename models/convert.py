"""Quantises a checkpoint: `python -m models.convert /path/to/Qwen3-VL-8B-Instruct qwen3-vl-8b-q4 --quant q4`.

The result is again a checkpoint folder: `model.safetensors` with the tensors that `models.quantisation` describes under
their published names, and `config.json` with a `quantization_config`. Weights are read, quantised and written slice by
slice, so that memory does not grow with the model. What is not quantised is stored as float32.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import gc
import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType

import numpy as np
from tqdm import tqdm

from models.checkpoint import DTYPES, LENGTH_BYTES, SINGLE_FILE, Checkpoint, StoredTensor
from models.config import ModelConfig, parse_config
from models.errors import CheckpointError, ConfigError, KestrelError
from models.huge_pages import ALIGNMENT
from models.model import find_folder
from models.quantisation import (
    CODINGS,
    ROWS,
    SCHEMES,
    Format,
    Scheme,
    find_scheme,
    quantise,
    require_finite,
    scale_name,
    stored_shapes,
)
from models.switches import Switches
from models.weights import CheckpointSource, expert_tensors, float_parameters, published_name

CONFIG_FILE = "config.json"
SLICE_VALUES = 1 << 22  # values that a thread holds as float32 at once: 16 MiB
MAX_THREADS = 16  # bounds the memory of machines with many cores
COPIED_SUFFIXES = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
COPIED_NAMES = frozenset({"LICENSE", "NOTICE"})


@dataclass(frozen=True)
class Parameter:
    """One parameter as it is going to be stored: under its published name; `shape` is that of the network if `format`
    quantises it, else that of the source."""

    name: str
    shape: tuple[int, ...]
    format: Format | None

    def tensors(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Name -> dtype and shape of what is stored of it."""
        if self.format is None:
            return {self.name: (np.dtype(np.float32), self.shape)}
        weight, scale = stored_shapes(self.shape, self.format)
        dtype = np.dtype(CODINGS[self.format].dtype)
        return {self.name: (dtype, weight), scale_name(self.name): (np.dtype(np.float16), scale)}


@dataclass(frozen=True)
class Slice:
    """What is read, quantised and written at once: rows of a matrix, one expert, or all of what stays float32.

    `index` is what to take of the source's tensor: rows, the number of an expert, or everything (`...`); `block` is the
    first block of rows that it fills, counted over all experts.
    """

    parameter: Parameter
    index: slice | int | EllipsisType
    block: int
    values: int


@dataclass(frozen=True)
class Conversion:
    """How large the weights were and are: bytes of the files, and the number of parameters."""

    source_bytes: int
    bytes: int
    parameters: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.parameters


def convert(source: str | Path, destination: str | Path, quant: str) -> Conversion:
    """Quantises the checkpoint `source`, a folder or a model of this repository, into the new folder `destination`.

    Everything is checked before a weight is read. The folder appears under its name when it is complete; until then it
    is called `<destination>.unfinished`.

    Raises:
        ConfigError: there is no such scheme or model, or `config.json` is not understood.
        CheckpointError: the source is incomplete, quantised or not finite; the destination exists or has no room.
    """
    scheme = find_scheme(quant)
    folder, destination = find_source(source), Path(destination).resolve()
    refuse_destination(destination, folder)
    checkpoint = open_float_checkpoint(folder)
    config = parse_config(checkpoint.config, str(folder / CONFIG_FILE))
    parameters = plan(checkpoint, config, scheme)
    extras = [file for file in sorted(folder.iterdir()) if belongs_to_model(file)]
    written = {SINGLE_FILE, CONFIG_FILE, *(file.name for file in extras)}
    with unfinished_folder(destination, written) as (unfinished, weights):
        size = write_weights(weights, unfinished / SINGLE_FILE, checkpoint, parameters)
        for file in extras:
            write_durably(unfinished / file.name, file.read_bytes())
        entries = checkpoint.config | {"quantization_config": scheme.config_entry()}
        write_durably(unfinished / CONFIG_FILE, json.dumps(entries, indent=2).encode() + b"\n")
        sync(unfinished)
        unfinished.rename(destination)
        sync(destination.parent)
    files = {checkpoint.file(name) for name in checkpoint.names()}
    return Conversion(
        source_bytes=sum(file.stat().st_size for file in files),
        bytes=size,
        parameters=sum(math.prod(parameter.shape) for parameter in parameters),
    )


def find_source(source: str | Path) -> Path:
    folder = find_folder(source)
    if folder is None:
        raise ConfigError(f"'{source}' is a shape without weights: name a checkpoint folder")
    return folder


def refuse_destination(destination: Path, source: Path) -> None:
    """Whatever would make the last step, giving the folder its name, fail."""
    if source.resolve() in (destination, unfinished_name(destination)):
        raise CheckpointError(f"{destination}: source and destination are the same folder")
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(f"{destination}: is a file; the destination is a folder that does not exist yet")
    if destination.exists() and next(destination.iterdir(), None) is not None:
        raise CheckpointError(f"{destination}: is not empty; name a new folder, or remove this one")
    if os.path.ismount(destination):
        raise CheckpointError(f"{destination}: is the root of a file system; name a folder within it")


def open_float_checkpoint(folder: Path) -> Checkpoint:
    checkpoint = Checkpoint.open(folder)
    entry = checkpoint.config.get("quantization_config")
    if entry is not None:
        method = entry.get("quant_method") if isinstance(entry, dict) else entry
        raise CheckpointError(
            f"{folder / CONFIG_FILE}: the checkpoint is already quantised (quantization_config: {method}); convert the "
            "bfloat16, float16 or float32 checkpoint that it was made from"
        )
    return checkpoint


def belongs_to_model(file: Path) -> bool:
    """Whether a file of the source is copied: tokenizer, template, preprocessor and generation settings, licence."""
    if file.name == CONFIG_FILE or file.name.endswith(".index.json") or not file.is_file():
        return False
    return file.suffix in COPIED_SUFFIXES or file.stem in COPIED_NAMES


def plan(checkpoint: Checkpoint, config: ModelConfig, scheme: Scheme) -> list[Parameter]:
    """The parameters of the network, in its order. Raises CheckpointError unless the checkpoint has exactly those."""
    source = CheckpointSource(checkpoint, config)
    parameters = []
    for path, like in float_parameters(config, Switches()).items():
        name, format = published_name(path, config), scheme.format_of(path)
        if name in checkpoint.names() or ".experts." not in name:
            source(path, like)  # only maps the tensor
        else:
            for expert in range(like.shape[0]):
                source.expert(name, expert, like.shape[1:])
        parameters.append(Parameter(name, checkpoint.shape(name) if format is None else like.shape, format))
    source.refuse_leftovers()
    return parameters


def slices(parameter: Parameter) -> Iterator[Slice]:
    """All of a parameter, in pieces of bounded size."""
    shape = parameter.shape
    if parameter.format is None:
        yield Slice(parameter, ..., 0, math.prod(shape))
    elif len(shape) == 3:
        for expert in range(shape[0]):
            yield Slice(parameter, expert, expert * -(-shape[1] // ROWS), math.prod(shape[1:]))
    else:
        outputs, inputs = shape
        height = max(1, SLICE_VALUES // (ROWS * inputs)) * ROWS
        for row in range(0, outputs, height):
            rows = slice(row, min(row + height, outputs))
            yield Slice(parameter, rows, row // ROWS, (rows.stop - row) * inputs)


def read_slice(checkpoint: Checkpoint, piece: Slice) -> np.ndarray:
    """The source's values. Each slice maps its tensor anew, because only the end of a map releases its pages."""
    parameter = piece.parameter
    if not isinstance(piece.index, int):
        return checkpoint.read(parameter.name)[piece.index]
    if parameter.name not in checkpoint.names():
        tensors = expert_tensors(parameter.name, piece.index)
        return np.concatenate([checkpoint.read(tensor).astype(np.float32) for tensor in tensors])
    expert = checkpoint.read(parameter.name)[piece.index]
    return expert if checkpoint.shape(parameter.name) == parameter.shape else expert.T


def convert_slice(checkpoint: Checkpoint, piece: Slice) -> dict[str, np.ndarray]:
    """Tensor name -> the part of it that the slice becomes."""
    parameter = piece.parameter
    where = f"{checkpoint.folder}: tensor '{parameter.name}'"
    values = read_slice(checkpoint, piece)
    if parameter.format is not None:
        quantised = quantise(values, parameter.format, where)
        return {parameter.name: quantised.weight, scale_name(parameter.name): quantised.scale}
    values = values.astype(np.float32)
    require_finite(values, where)
    return {parameter.name: values}


def lay_out(file: Path, parameters: Iterable[Parameter]) -> tuple[bytes, dict[str, StoredTensor], int]:
    """The beginning of a safetensors file with these parameters, where its tensors lie, and its size in bytes.

    The format allows no holes, so tensors come in the order of the power of two that divides their size: then each
    begins at a multiple of its own, and all of whole multiples of 64 bytes at multiples of 64.
    """
    tensors = {name: stored for parameter in parameters for name, stored in parameter.tensors().items()}
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in tensors.items()}
    spelling = {dtype: text for text, dtype in DTYPES.items()}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, position = {}, 0
    for name in sorted(tensors, key=lambda name: -math.gcd(sizes[name], ALIGNMENT)):
        dtype, shape = tensors[name]
        begins[name] = position
        position += sizes[name]
        header[name] = {"dtype": spelling[dtype], "shape": shape, "data_offsets": [begins[name], position]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
    beginning = len(text).to_bytes(LENGTH_BYTES, "little") + text
    stored = {name: StoredTensor(file, *tensors[name], len(beginning) + begin) for name, begin in begins.items()}
    return beginning, stored, len(beginning) + position


def write_weights(descriptor: int, file: Path, checkpoint: Checkpoint, parameters: list[Parameter]) -> int:
    """Fills the empty `file`, open as `descriptor`, and returns its size. Its header comes last: before, no reader
    takes it for a checkpoint."""
    header, tensors, size = lay_out(file, parameters)
    reserve(descriptor, file, size)
    pieces = [piece for parameter in parameters for piece in slices(parameter)]

    def write(piece: Slice) -> int:
        for name, part in convert_slice(checkpoint, piece).items():
            offset = piece.block * part[0].nbytes if piece.block else 0
            write_at(descriptor, part, tensors[name].start + offset)
        return piece.values

    total = sum(piece.values for piece in pieces)
    bar = tqdm(total=total, desc="quantising", unit="weights", unit_scale=True, leave=False)
    pool = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))))
    try:
        with bar:
            for values in pool.map(write, pieces):
                bar.update(values)
    finally:
        pool.shutdown(cancel_futures=True)
    os.fsync(descriptor)
    write_at(descriptor, np.frombuffer(header, np.uint8), 0)
    os.fsync(descriptor)
    return size


def reserve(descriptor: int, file: Path, size: int) -> None:
    """Gives the file its size on disk, or raises CheckpointError."""
    free = shutil.disk_usage(file.parent).free
    if size > free:
        raise CheckpointError(f"{file}: needs {readable(size)} of disk space, of which {readable(free)} are free")
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise CheckpointError(f"{file}: {readable(size)} cannot be reserved ({error.strerror})") from error


def write_at(descriptor: int, array: np.ndarray, start: int) -> None:
    """Writes the bytes of an array at a place of a file. Several threads may do so at once."""
    rest = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    while rest:
        written = os.pwrite(descriptor, rest, start)
        rest, start = rest[written:], start + written


def unfinished_name(destination: Path) -> Path:
    return destination.parent / f"{destination.name}.unfinished"


@contextlib.contextmanager
def unfinished_folder(destination: Path, written: set[str]) -> Iterator[tuple[Path, int]]:
    """A folder beside the destination with an empty weights file in it, open for writing, that is gone afterwards
    unless it was renamed. It is cleared of what an interrupted run left; two runs at once cannot share it."""
    folder = unfinished_name(destination)
    try:
        folder.mkdir(exist_ok=True)
        descriptor = os.open(folder / SINGLE_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be written ({error.strerror}); the destination needs a parent folder that can"
        ) from error
    try:
        claim(descriptor, folder, written)
        try:
            yield folder, descriptor
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def claim(descriptor: int, folder: Path, written: set[str]) -> None:
    """Locks the folder and empties it, or raises CheckpointError if it is in use or holds what no run writes."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise CheckpointError(f"{folder}: another conversion is writing to it") from error
    leftovers = [file for file in folder.iterdir() if file.name != SINGLE_FILE]
    for file in leftovers:
        if file.name not in written:
            raise CheckpointError(f"{folder}: holds {file.name}, which this conversion does not write; move it away")
    for file in leftovers:
        file.unlink()
    os.ftruncate(descriptor, 0)


def write_durably(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def sync(folder: Path) -> None:
    """Makes the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def readable(size: int) -> str:
    """A number of bytes."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m models.convert",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Quantises the weights of a checkpoint to 4 or 8 bits, in groups of 32 that share a scale.",
        epilog="""\
schemes (bits per weight, scales included):
  q4          decoder, experts, embeddings and head 4.5; vision tower 8.5
  q4-head-q8  decoder and experts 4.5; embeddings, head and vision tower 8.5
  q8          everything 8.5
Mixture-of-experts routers, norms, biases, and the vision tower's patch embedding and
position table are stored as float32. Tokenizer, chat template, preprocessor and
generation settings are copied.

The folder is written as DST.unfinished and renamed at the end. An interrupted run leaves
at most that one, and the next run with the same DST clears it.""",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a Hugging Face checkpoint folder (bfloat16, float16 or float32), tiny-vl or tiny-moe",
    )
    parser.add_argument("destination", metavar="DST", help="the folder to make: must not exist, or be empty")
    parser.add_argument(
        "--quant", default="q4", metavar="SCHEME", help=f"{', '.join(SCHEMES)}; without this option, %(default)s"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 2 is the exit status of anything the user can put right."""
    options = parse_arguments(arguments)
    # JAX has Python call it at every garbage collection, and an interrupt that comes during such a call is dropped.
    gc.disable()
    try:
        result = convert(options.source, options.destination, options.quant)
    except (KestrelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted; nothing is left of the conversion", file=sys.stderr)
        return 130
    finally:
        gc.enable()
    print(
        f"{options.source}: {readable(result.source_bytes)} -> {options.destination}: {readable(result.bytes)}, "
        f"{result.bits_per_weight:.2f} bits per weight"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
