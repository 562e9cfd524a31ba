"""The presets have the published sizes: one wrong dimension changes the number of parameters."""

import math

import jax
import pytest
from flax import nnx

from models.config import parse_config
from models.errors import ConfigError
from models.network import Network
from models.presets import preset
from models.switches import Switches


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-vl-2b", 2_127_532_032),
        ("qwen3-vl-8b", 8_767_123_696),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-vl-30b-a3b", 31_070_754_032),
    ],
)
def test_number_of_parameters(name, parameters):
    network = Network(parse_config(preset(name)), Switches())
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(network))) == parameters


def test_an_unknown_preset_lists_the_known():
    with pytest.raises(ConfigError, match="qwen3-vl-2b"):
        preset("qwen3-vl-3b")
