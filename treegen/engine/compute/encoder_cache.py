"""Caches image embeddings: each image is encoded once, and kept as long as there is room."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from treegen.model.batch import ImageRows
from treegen.model.vision.tower import ImageEmbedding, VisionTower
from treegen.prompts.images.table import ImageTable, MRopePositions, PlacedImage

_MOST_BYTES: Final = 2**32  # on the host; the least recently used image is dropped first


class EncoderCache:
    """Caches the image embeddings of the vision tower by image digest.

    table: the images.
    rotary: rotary positions of tokens, if images have axes; None otherwise.
    """

    def __init__(self, table: ImageTable, tower: VisionTower) -> None:
        """Set up an empty cache."""
        self.table, self._tower = table, tower
        self.rotary = MRopePositions(table, tower.positions) if tower.has_axes else None
        self._encoded: OrderedDict[str, ImageEmbedding] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_encoded(self) -> int:
        """Number of images encoded so far."""
        return self._tower.num_encoded

    def gather_rows(self, tokens: NDArray[np.int64]) -> ImageRows | None:
        """Return the embeddings at the places of images among a pass's tokens; None without images.

        They are on the host, so that they can be sent to other ranks, which have no vision tower.
        """
        if not self.table.has_images(tokens):
            return None
        places, rows, added = [], [], []
        for image, at in self.table.pieces(tokens):
            encoded = self._get_or_encode(image)
            index = torch.from_numpy(tokens[at] - image.first)
            places.append(at)
            rows.append(encoded.rows_ND[index])
            added.append([each[index] for each in encoded.added])
        return ImageRows(
            torch.from_numpy(np.concatenate(places)),
            torch.cat(rows),
            tuple(torch.cat(layer) for layer in zip(*added, strict=True)),
        )

    def _get_or_encode(self, image: PlacedImage) -> ImageEmbedding:
        found = self._encoded.get(image.digest)
        if found is None:
            found = self._tower.encode(self.table.inputs(image), image.num)
            self._encoded[image.digest] = found
            self._num_bytes += found.nbytes
            while self._num_bytes > _MOST_BYTES and len(self._encoded) > 1:
                _, gone = self._encoded.popitem(last=False)
                self._num_bytes -= gone.nbytes
        self._encoded.move_to_end(image.digest)
        return found
