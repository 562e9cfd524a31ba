"""Position ids of prompts with pictures and videos."""

import numpy as np
import pytest

from models.errors import PromptError
from models.positions import rope_positions
from models.switches import Switches

from .conftest import IMAGE, VIDEO


def positions(ids, grids, config, **switches):
    rows, delta = rope_positions(np.array(ids, np.int32), grids, config, Switches(**switches))
    return rows.tolist(), delta


def test_text_counts_on_every_axis(vl_config):
    assert positions([1, 2, 3], [], vl_config) == ([[0, 1, 2]] * 3, 0)


def test_a_picture_spans_a_plane_and_the_text_goes_on_after_its_longest_side(vl_config):
    rows, delta = positions([7, *[IMAGE] * 6, 8, 9], [(1, 4, 6)], vl_config)
    assert rows[0] == [0, 1, 1, 1, 1, 1, 1, 4, 5]
    assert rows[1] == [0, 1, 1, 1, 2, 2, 2, 4, 5]
    assert rows[2] == [0, 1, 2, 3, 1, 2, 3, 4, 5]
    assert delta == 6 - 9


def test_adjacent_pictures_and_the_frames_of_a_video_are_planes_one_after_the_other(vl_config):
    rows, delta = positions([*[IMAGE] * 2, *[VIDEO] * 1, 5, *[VIDEO] * 1], [(1, 2, 4), (2, 2, 2)], vl_config)
    assert rows == [[0, 0, 2, 3, 4], [0, 0, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert delta == 0


def test_switches(vl_config):
    ids, grids = [*[IMAGE] * 2, 5], [(1, 2, 4)]
    assert positions(ids, grids, vl_config, mrope="1d") == ([[0, 1, 2]] * 3, 0)
    assert positions(ids, grids, vl_config, swap_rows_and_columns=True)[0] == [[0, 0, 2], [0, 1, 2], [0, 0, 2]]


@pytest.mark.parametrize(
    ("ids", "grids", "which"),
    [([IMAGE], [], "more"), ([1], [(1, 2, 2)], "fewer"), ([IMAGE, 1], [(1, 4, 2)], "more")],
)
def test_placeholders_that_do_not_match_are_refused(vl_config, ids, grids, which):
    with pytest.raises(PromptError, match=which):
        positions(ids, grids, vl_config)
