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
        cache.put(("me", name), features(3))
    assert cache.get(("me", "a")) is not None
    cache.put(("me", "d"), features(3))
    assert [name for name in "abcd" if cache.get(("me", name))] == ["a", "c", "d"]
    assert cache.nbytes == 864
    assert (cache.queries, cache.hits) == (5, 4)


def test_a_picture_without_room_is_not_kept():
    cache = ImageCache(100)
    cache.put(("me", "small"), features(1))
    cache.put(("me", "large"), features(2))
    assert cache.get(("me", "large")) is None
    assert cache.get(("me", "small")) is not None


def test_a_picture_counts_once():
    cache = ImageCache(1000)
    for _ in range(3):
        cache.put(("me", "a"), features(2))
    assert cache.nbytes == 192


def test_a_picture_of_one_owner_is_not_known_to_another():
    cache = ImageCache(1000)
    cache.put(("me", "a"), features(2))
    assert cache.get(("you", "a")) is None
    assert (cache.queries, cache.hits) == (1, 0)
