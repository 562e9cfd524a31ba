"""What the switches of the networks can be."""

import pytest

from models import Switches
from models.errors import ConfigError


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mrope": False}, "mrope must be one of interleaved, sectioned, 1d, found False"),
        ({"mrope": "interleave"}, "found 'interleave'"),
        ({"deepstack": "off"}, "deepstack must be True or False, found 'off'"),
        ({"qk_norm": None}, "qk_norm"),
    ],
)
def test_a_value_that_turns_nothing_off_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        Switches(**wrong)
