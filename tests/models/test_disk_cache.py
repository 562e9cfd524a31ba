"""Which blocks of a sequence are kept in files, who finds them again, and what becomes of files that cannot be used."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save

from models import disk_cache
from models.cache import CACHE_TYPES, LayerCache, layer_shapes
from models.config import parse_config
from models.disk_cache import SECRET_FILE, DiskCache, fingerprint, open_folder
from models.errors import ConfigError
from models.inference import plan_chunks
from models.presets import preset
from models.slots import Slot, SlotTable
from models.switches import Switches

CONFIG = parse_config(preset("qwen3-vl-2b"), "preset")
CONTEXT, LAYERS = 1024, 2
BUDGET = 2**30
KEY = "sk-a-key-that-nobody-may-read"


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 500, length)


class Sequences:
    """Slots with sequences, the cache that they stand for, and a folder for its blocks."""

    def __init__(self, folder: Path, kv: str = "int8", *, row_by_row: bool = True, model: str = "a", budget=BUDGET):
        self.how = {"row_by_row": row_by_row, "largest_chunk": 256}
        self.shapes = layer_shapes(CONFIG.text, LAYERS, 64 if row_by_row else 256, kv)
        self.disk = DiskCache(folder, budget, model, self.shapes, **self.how)
        self.slots = SlotTable(1, CONTEXT, reuse=False, **self.how)
        whole = layer_shapes(CONFIG.text, LAYERS, CONTEXT, kv)
        random = np.random.default_rng(3)
        self.cache = jax.tree.map(lambda array: random.integers(-9, 9, array.shape).astype(array.dtype), whole)
        self.read = 0

    def block(self, start: int) -> LayerCache:
        """What lies in the cache from a token on."""
        self.read += 1
        tokens = self.shapes.keys.shape[2]
        return jax.tree.map(lambda array: array[:, :, start : start + tokens], self.cache)

    def compute(self, keys: np.ndarray, answer: int = 0, owner: str = "") -> Slot:
        """A slot after a prompt and its answer."""
        slot = self.slots.take(keys, owner).slot
        for chunk in plan_chunks(len(keys)):
            slot.take_in(keys[chunk.start : chunk.start + chunk.tokens], chunk)
        slot.take_in(np.arange(9000, 9000 + answer))
        self.slots.release(slot)
        return slot

    def keep(self, keys: np.ndarray, answer: int = 0, owner: str = "") -> None:
        self.disk.store(self.compute(keys, answer, owner), self.block, ended=True)

    def found(self, keys: np.ndarray, owner: str = "", held: int = 0) -> int:
        """Tokens of a prompt that are in files."""
        blocks = self.disk.find(keys, owner, held)
        return blocks[-1].end if blocks else 0


def block_files(folder: Path) -> list[Path]:
    """The blocks in a folder, the one used longest ago first."""
    return sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)


@pytest.mark.parametrize("kv", CACHE_TYPES)
@pytest.mark.parametrize("row_by_row", [True, False])
def test_what_was_kept_comes_back_after_a_restart(tmp_path, kv, row_by_row):
    before = Sequences(tmp_path, kv, row_by_row=row_by_row)
    keys = prompt(400)
    before.keep(keys)
    before.disk.close()
    after = Sequences(tmp_path, kv, row_by_row=row_by_row)
    blocks = after.disk.find(keys, "", 0)
    assert blocks[0].chunk.start == 0
    assert [block.end for block in blocks[:-1]] == [block.chunk.start for block in blocks[1:]]
    assert blocks[-1].end == 384
    for block in blocks:
        kept = after.disk.read(block)
        for array, whole in zip(jax.tree.leaves(kept), jax.tree.leaves(before.cache), strict=True):
            assert array.dtype == whole.dtype
            tokens = slice(block.chunk.start, block.end)
            np.testing.assert_array_equal(array[:, :, : block.chunk.tokens], whole[:, :, tokens])
    assert (after.disk.queries, after.disk.hits, after.disk.read_tokens) == (1, 1, 384)


def test_the_next_turn_finds_all_but_the_last_few_tokens(tmp_path):
    sequences = Sequences(tmp_path)
    first = prompt(200)
    sequences.keep(first, answer=50)
    turn = np.concatenate([first, np.arange(9000, 9050), prompt(30, 1)])
    assert sequences.found(turn) == 240
    assert sequences.found(turn, held=230) == 0, "so few are computed as fast"
    assert [block.chunk.start for block in sequences.disk.find(turn, "", 200)] == [192, 208, 224]
    assert sequences.found(turn[:240]) == 224, "an answer follows from the last token, which is computed"


def test_sequences_that_begin_alike_share_what_they_have_in_common(tmp_path):
    sequences = Sequences(tmp_path)
    system = prompt(200)
    sequences.keep(np.concatenate([system, prompt(60, 1)]))
    read, files = sequences.read, sequences.disk.files
    other = np.concatenate([system, prompt(80, 2)])
    assert sequences.found(other) == 192
    sequences.keep(other)
    assert sequences.read - read == sequences.disk.files - files == 2, "the rest of 280 in blocks of 64 and 16"
    sequences.keep(other)
    assert sequences.read - read == 2


@pytest.mark.parametrize(
    ("first", "second", "shared", "usable"),
    [
        (600, 700, 600, 576),  # as in `test_slots.py`
        (300, 700, 300, 256),
        (140, 100, 99, 64),
        (600, 700, 300, 256),
        (100, 700, 100, 0),
        (80, 80, 79, 64),
    ],
)
def test_where_rows_depend_on_chunks_blocks_are_chunks(tmp_path, first, second, shared, usable):
    sequences = Sequences(tmp_path, "float32", row_by_row=False)
    keys = prompt(first)
    sequences.keep(keys, answer=40)
    assert sequences.found(np.concatenate([keys[:shared], prompt(second - shared, 5) + 1000])) == usable


def test_short_sequences_are_not_worth_a_file(tmp_path):
    sequences = Sequences(tmp_path)
    sequences.keep(prompt(63))
    assert sequences.disk.files == 0


def test_the_last_few_tokens_are_kept_when_a_sequence_has_ended(tmp_path):
    sequences = Sequences(tmp_path)
    slot = sequences.compute(prompt(100))
    sequences.disk.store(slot, sequences.block)
    assert sequences.found(prompt(101)) == 64
    sequences.disk.store(slot, sequences.block, ended=True)
    assert sequences.found(np.append(prompt(100), 7)) == 96


def test_only_the_same_model_and_owner_find_anything(tmp_path):
    keys = prompt(200)
    before = Sequences(tmp_path)
    before.keep(keys, owner=KEY)
    before.disk.close()
    assert Sequences(tmp_path).found(keys, KEY) == 192
    assert Sequences(tmp_path).found(keys) == 0
    assert Sequences(tmp_path).found(keys, "another key") == 0
    assert Sequences(tmp_path, model="b").found(keys, KEY) == 0
    os.unlink(tmp_path / SECRET_FILE)
    assert Sequences(tmp_path).found(keys, KEY) == 0


def test_neither_keys_nor_tokens_are_written_and_files_are_private(tmp_path):
    folder = tmp_path / "new" / "folder"
    sequences = Sequences(folder)
    sequences.keep(prompt(200), owner=KEY)
    sequences.disk.close()
    assert folder.stat().st_mode & 0o777 == 0o700
    files = list(folder.iterdir())
    assert len(files) == 1 + 3
    for file in files:
        assert file.stat().st_mode & 0o777 == 0o600
        content = file.read_bytes()
        assert KEY.encode() not in content
        for dtype in (np.int32, np.int64):
            assert prompt(200)[:8].astype(dtype).tobytes() not in content


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)


def replace_by_another(file: Path) -> None:
    other = next(other for other in file.parent.glob("*.safetensors") if other != file)
    file.write_bytes(other.read_bytes())


def put_other_tensors(file: Path) -> None:
    file.write_bytes(save({"keys": np.zeros(2, np.float32)}))


def put_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize(
    "damage",
    [
        cut_off,
        flip_a_bit,
        replace_by_another,
        put_a_folder,
        lambda file: file.write_bytes(b""),
        lambda file: file.write_text("a note of somebody else"),
        put_other_tensors,
    ],
)
def test_a_damaged_file_is_told_once_and_left_out(tmp_path, caplog, damage):
    keys = prompt(200)
    sequences = Sequences(tmp_path)
    sequences.keep(keys)
    sequences.disk.close()
    after = Sequences(tmp_path)
    blocks = after.disk.find(keys, "", 0)
    assert len(blocks) == 3
    damage(tmp_path / f"{blocks[1].name}.safetensors")
    assert after.disk.read(blocks[0]) is not None
    assert after.disk.read(blocks[1]) is None
    assert blocks[1].name in caplog.text
    assert len(caplog.records) == 1
    assert after.found(keys) == 64
    after.keep(keys)
    after.disk.close()
    if damage is not put_a_folder:
        assert len(caplog.records) == 1
        assert Sequences(tmp_path).found(keys) == 192


def test_foreign_files_are_left_alone(tmp_path, caplog):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ("0" * 64 + ".safetensors")).mkdir()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    sequences = Sequences(tmp_path, budget=1)
    sequences.keep(prompt(200))
    assert sequences.disk.files == sequences.disk.nbytes == 0
    sequences.disk.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "0" * 64 + ".safetensors",
        "model.safetensors",
        "notes.txt",
        SECRET_FILE,
    ]
    assert not caplog.records


def test_what_another_program_has_removed_is_computed_again(tmp_path, caplog):
    keys = prompt(200)
    sequences = Sequences(tmp_path)
    sequences.keep(keys)
    sequences.disk.close()
    after = Sequences(tmp_path)
    blocks = after.disk.find(keys, "", 0)
    for file in block_files(tmp_path):
        file.unlink()
    assert after.disk.read(blocks[0]) is None
    assert after.found(keys) == 0
    assert not caplog.records


def test_the_blocks_used_longest_ago_go_first_and_the_end_of_a_sequence_before_its_beginning(tmp_path):
    one = Sequences(tmp_path / "one")
    one.keep(prompt(64))
    one.disk.close()
    size = block_files(tmp_path / "one")[0].stat().st_size + disk_cache.OVERHEAD
    sequences = Sequences(tmp_path, budget=7 * size)
    first, second, third = (prompt(192, seed) for seed in range(3))
    sequences.keep(first)
    sequences.keep(second)
    assert sequences.found(np.append(first, 1)) == 192
    sequences.keep(third)
    assert [sequences.found(np.append(keys, 1)) for keys in (first, second, third)] == [192, 64, 192]
    sequences.disk.close()
    assert sum(file.stat().st_size for file in block_files(tmp_path)) <= sequences.disk.nbytes <= 7 * size
    smaller = Sequences(tmp_path, budget=2 * size)
    assert [smaller.found(np.append(keys, 1)) for keys in (first, second, third)] == [0, 0, 128]
    smaller.disk.close()
    assert len(block_files(tmp_path)) == 2


def test_what_waits_to_be_written_can_be_read_and_is_bounded(tmp_path, monkeypatch):
    written = threading.Event()
    write = disk_cache._write_whole

    def slow(file: Path, content: bytes) -> None:
        written.wait(60)
        write(file, content)

    sequences = Sequences(tmp_path)
    monkeypatch.setattr(disk_cache, "_write_whole", slow)
    sequences.disk._most_waiting = 3
    keys = prompt(401)
    sequences.keep(keys)
    assert sequences.read == 3
    assert sequences.found(keys) == 192
    block = sequences.disk.find(keys, "", 0)[1]
    np.testing.assert_array_equal(sequences.disk.read(block).keys, sequences.block(64).keys)
    assert block_files(tmp_path) == []
    written.set()
    sequences.disk.close()
    assert len(block_files(tmp_path)) == 3


def test_a_full_disk_costs_nothing_but_what_cannot_be_kept(tmp_path, monkeypatch, caplog):
    def full(file: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    sequences = Sequences(tmp_path)
    monkeypatch.setattr(disk_cache, "_write_whole", full)
    keys = prompt(401)
    sequences.keep(keys)
    sequences.disk.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert os.strerror(errno.ENOSPC) in caplog.text
    block = sequences.disk.find(keys, "", 0)[0]
    assert sequences.disk.read(block) is None


def test_only_old_unfinished_files_are_removed(tmp_path):
    new, old = tmp_path / "new.part", tmp_path / "old.part"
    for file in (new, old):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    Sequences(tmp_path)
    assert new.exists()
    assert not old.exists()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("no folder")
    with pytest.raises(ConfigError, match="cannot be kept there"):
        open_folder(file)
    with pytest.raises(ConfigError, match="cannot be kept there"):
        open_folder(file / "below")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o770)
    with pytest.raises(ConfigError, match="chmod 700"):
        open_folder(shared)


def test_a_damaged_secret_is_replaced(tmp_path):
    first = open_folder(tmp_path)
    assert open_folder(tmp_path) == first
    (tmp_path / SECRET_FILE).write_bytes(first[:7])
    second = open_folder(tmp_path)
    assert len(second) == len(first)
    assert second[:7] != first[:7]


def test_everything_that_bits_depend_on_is_in_the_fingerprint(monkeypatch):
    def found(config=CONFIG, switches=None, kv="int8", weights="a", context=512) -> str:
        return fingerprint(config, switches or Switches(), kv, weights, context)

    first = found()
    assert found() == first
    assert found(context=1024) == first
    others = {
        found(config=parse_config(preset("qwen3-vl-8b"), "preset")),
        found(switches=Switches(qk_norm=False)),
        found(kv="float32"),
        found(weights="b"),
    }
    monkeypatch.setattr(disk_cache, "active_variant", lambda: None)
    others |= {found(), found(context=1024)}
    monkeypatch.setattr(disk_cache, "_processor", lambda: "another processor")
    others |= {found()}
    assert len(others - {first}) == 7
