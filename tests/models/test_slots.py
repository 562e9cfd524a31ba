"""Which cached tokens a new prompt may use, and whose slot is given away."""

import numpy as np
import pytest

from models.inference import Chunk, plan_chunks
from models.slots import LEAST_REUSED, Slot, SlotTable

CONTEXT = 1024


def table(count: int = 3, *, reuse: bool = True, row_by_row: bool = True) -> SlotTable:
    return SlotTable(count, CONTEXT, reuse=reuse, row_by_row=row_by_row, largest_chunk=256)


def run(slots: SlotTable, keys: np.ndarray, answer: int = 3, owner: str = "") -> tuple[Slot, int]:
    """Has a sequence computed in a slot, and gives that back; the slot, and the tokens that were there already."""
    slot = slots.take(keys, owner).slot
    reused = slot.held
    for chunk in plan_chunks(len(keys), reused):
        slot.take_in(keys[chunk.start : chunk.start + chunk.tokens], chunk)
    for token in range(answer):
        slot.take_in(np.array([9000 + token]))
    slots.release(slot)
    return slot, reused


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 500, length)


def test_the_next_turn_goes_on_in_the_same_slot():
    slots = table()
    first = prompt(100)
    slot, reused = run(slots, first)
    assert reused == 0
    turn = np.concatenate([first, [9000, 9001, 9002], prompt(20, 1)])
    again, reused = run(slots, turn)
    assert again is slot
    assert reused == 103
    assert slot.held == len(turn) + 3


def test_another_prompt_that_begins_alike_gets_a_copy():
    slots = table()
    system = prompt(200)
    slot, _ = run(slots, np.concatenate([system, prompt(50, 1)]))
    place = slots.take(np.concatenate([system, prompt(50, 2)]), "")
    assert place.source is slot
    assert place.slot is not slot
    assert place.slot.held == 200
    assert slot.held == 253


def test_with_one_slot_what_differs_is_dropped():
    slots = table(1)
    system = prompt(200)
    slot, _ = run(slots, np.concatenate([system, prompt(50, 1)]))
    place = slots.take(np.concatenate([system, prompt(50, 2)]), "")
    assert (place.slot, place.source, slot.held) == (slot, None, 200)


def test_the_tokens_of_a_running_sequence_are_copied():
    slots = table(2)
    keys = prompt(100)
    running = slots.take(keys, "").slot
    running.take_in(keys[:64], Chunk(0, 64, 64))
    place = slots.take(keys, "")
    assert (place.source, place.slot.held) == (running, 64)


def test_the_last_token_of_a_prompt_is_always_computed():
    slots = table()
    keys = prompt(100)
    run(slots, keys)
    _, reused = run(slots, keys)
    assert reused == 99


def test_few_tokens_are_not_worth_it():
    slots = table()
    keys = prompt(100)
    run(slots, keys)
    for shared, wanted in ((LEAST_REUSED - 1, 0), (LEAST_REUSED, LEAST_REUSED)):
        other = np.concatenate([keys[:shared], prompt(30, 7) + 1000])
        assert run(slots, other)[1] == wanted


def test_owners_do_not_share():
    slots = table()
    keys = prompt(100)
    run(slots, keys, owner="a")
    assert run(slots, keys, owner="b")[1] == 0
    assert run(slots, keys, owner="a")[1] == 99


def test_reuse_can_be_off():
    slots = table(reuse=False)
    keys = prompt(100)
    run(slots, keys)
    assert run(slots, keys)[1] == 0


def test_the_slot_that_was_used_longest_ago_is_given_away():
    slots = table(2)
    first, _ = run(slots, prompt(100, 1))
    second, _ = run(slots, prompt(100, 2))
    assert first is not second
    assert run(slots, prompt(100, 1))[0] is first  # now the second is the older one
    assert run(slots, prompt(100, 3))[0] is second


@pytest.mark.parametrize(
    ("first", "second", "shared", "usable"),
    [
        (600, 700, 600, 576),  # both begin with 256 + 256 + 64
        (300, 700, 300, 256),
        (140, 100, 99, 64),  # 64 + 64 + 16 and 64 + 16 + 16 + 4
        (600, 700, 300, 256),  # they differ within the second chunk
        (100, 700, 100, 0),  # 64 and 256
        (20, 20, 19, 16),
    ],
)
def test_where_rows_depend_on_chunks_only_equal_ones_are_used(first, second, shared, usable):
    slots = table(row_by_row=False)
    keys = prompt(first)
    run(slots, keys)
    other = np.concatenate([keys[:shared], prompt(second - shared, 5) + 1000])
    assert run(slots, other)[1] == usable


def test_reused_chunks_can_be_used_again():
    slots = table(1, row_by_row=False)
    keys = prompt(900)
    run(slots, keys[:600])
    assert run(slots, keys[:700])[1] == 576
    assert run(slots, keys[:800])[1] == 512
    assert run(slots, keys)[1] == 768


def test_counts_for_operators():
    slots = table(3)
    run(slots, prompt(50), answer=2)
    slots.take(prompt(60, 1), "").slot.take_in(prompt(60, 1))
    assert (slots.running, slots.kept_tokens) == (1, 52)
