"""Which encoded pictures are kept."""

import numpy as np

from models.image_cache import ImageCache
from models.inference import VisualFeatures


def features(tokens: int) -> VisualFeatures:
    """4 * (8 + 16) = 96 bytes per token."""
    return VisualFeatures(np.zeros((tokens, 8), np.float32), np.zeros((2, tokens, 8), np.float32))


def test_the_least_recently_used_picture_goes_first():
    cache = ImageCache(960)
    for name in ("a", "b", "c"):
        cache.put(name, features(3))
    assert cache.get("a") is not None
    cache.put("d", features(3))
    assert [name for name in "abcd" if cache.get(name)] == ["a", "c", "d"]
    assert cache.nbytes == 864
    assert (cache.queries, cache.hits) == (5, 4)


def test_a_picture_without_room_is_not_kept():
    cache = ImageCache(100)
    cache.put("small", features(1))
    cache.put("large", features(2))
    assert cache.get("large") is None
    assert cache.get("small") is not None


def test_a_picture_counts_once():
    cache = ImageCache(1000)
    for _ in range(3):
        cache.put("a", features(2))
    assert cache.nbytes == 192
