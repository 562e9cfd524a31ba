"""Where patches lie, and that padding and neighbours change nothing in the vision tower."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.inference import LARGE_FRAME, frame_bucket
from models.vision import QUERY_BLOCK, patch_layout


def test_patches_of_a_merge_block_follow_each_other():
    layout = patch_layout(4, 6, 2, 48)
    assert layout.rows[:8].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.columns[:8].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert layout.rows[12:14].tolist() == [2, 2]
    assert sorted(zip(layout.rows.tolist(), layout.columns.tolist(), strict=True)) == [
        (row, column) for row in range(4) for column in range(6)
    ]


def test_positions_span_the_whole_table_with_weights_that_add_up():
    layout = patch_layout(4, 6, 2, 48)
    np.testing.assert_allclose(layout.table_weight.sum(axis=1), 1.0, rtol=1e-6)
    table = np.arange(48 * 48).reshape(48, 48)
    interpolated = (table.reshape(-1)[layout.table_index] * layout.table_weight).sum(axis=1)
    expected = layout.rows * (47 / 3) * 48 + layout.columns * (47 / 5)
    np.testing.assert_allclose(interpolated, expected, rtol=1e-5)


def test_a_frame_of_the_tables_own_size_reads_it_directly():
    layout = patch_layout(6, 6, 2, 6)
    np.testing.assert_array_equal(layout.table_index[:, 0], layout.rows * 6 + layout.columns)
    np.testing.assert_allclose(layout.table_weight[:, 0], 1.0)


@nnx.jit
def encode(visual: nnx.Module, *arguments):
    return visual(*arguments)


def tower(inference, patches: np.ndarray, height: int, width: int, padding: int = 0):
    """The tower itself on one frame, padded by `padding` patches: embeddings and features without the padding."""
    layout = patch_layout(height, width, 2, 6)
    arrays = (patches, layout.rows, layout.columns, layout.table_index, layout.table_weight)
    padded = [jnp.asarray(np.pad(array, [(0, padding)] + [(0, 0)] * (array.ndim - 1)))[None] for array in arrays]
    valid = jnp.arange(len(patches) + padding)[None] < len(patches)
    embeddings, deepstack = encode(inference.network.visual, *padded, valid)
    return embeddings[0, : len(patches) // 4], deepstack[:, 0, : len(patches) // 4]


@pytest.mark.parametrize("grid", [(1, 4, 6), (1, 8, 8), (1, 10, 8)])
def test_padding_to_the_bucket_changes_nothing(vl_inference, grid):
    patches = np.random.default_rng(0).standard_normal((grid[1] * grid[2], 1536)).astype(np.float32)
    features = vl_inference.encode(patches, grid)
    embeddings, deepstack = tower(vl_inference, patches, *grid[1:])
    np.testing.assert_allclose(features.embeddings, embeddings, atol=1e-5)
    np.testing.assert_allclose(features.deepstack, deepstack, atol=1e-5)


def test_frames_do_not_see_each_other(vl_inference):
    random = np.random.default_rng(0)
    frames = random.standard_normal((2, 24, 1536)).astype(np.float32)
    both = vl_inference.encode(frames.reshape(48, 1536), (2, 4, 6))
    alone = vl_inference.encode(frames[1], (1, 4, 6))
    np.testing.assert_array_equal(both.embeddings[6:], alone.embeddings)


def test_attention_in_query_blocks_is_the_same(vl_inference):
    """A picture large enough for blocks, against the same padded to a size that does not divide into them."""
    height = 2 * QUERY_BLOCK // 32
    patches = np.random.default_rng(0).standard_normal((height * 32, 1536)).astype(np.float32)
    blocked = vl_inference.encode(patches, (1, height, 32))
    whole, _ = tower(vl_inference, patches, height, 32, padding=4)
    np.testing.assert_allclose(blocked.embeddings, whole, atol=1e-5)


@pytest.mark.parametrize(
    ("patches", "bucket"), [(1, 64), (64, 64), (65, 128), (1000, 1024), (1025, 2048), (5000, 5120)]
)
def test_frame_buckets(patches, bucket):
    assert frame_bucket(patches) == bucket
    assert bucket < LARGE_FRAME or bucket % QUERY_BLOCK == 0
