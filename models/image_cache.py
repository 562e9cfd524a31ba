"""Pictures that have been through the vision tower, kept while there is room."""

from __future__ import annotations

from collections import OrderedDict

from models.inference import VisualFeatures

Picture = tuple[str, str]  # owner and content hash


class ImageCache:
    """Features of pictures by owner and content hash, the least recently used dropped first. What was kept for one
    owner is not found for another, who could tell by the time that it takes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._kept: OrderedDict[Picture, VisualFeatures] = OrderedDict()
        self.queries = 0
        self.hits = 0

    @property
    def nbytes(self) -> int:
        """Memory that the features take."""
        return self._bytes

    def get(self, picture: Picture) -> VisualFeatures | None:
        """The features of a picture, if they are kept."""
        self.queries += 1
        features = self._kept.get(picture)
        if features is not None:
            self.hits += 1
            self._kept.move_to_end(picture)
        return features

    def put(self, picture: Picture, features: VisualFeatures) -> None:
        """Keeps features, unless they alone take more than there is room for."""
        if features.nbytes > self._max_bytes or picture in self._kept:
            return
        self._kept[picture] = features
        self._bytes += features.nbytes
        while self._bytes > self._max_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
