"""Caches image embeddings: each image is encoded once, and kept as long as there is room."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from treegen.common.outputs import Usage
from treegen.engine.compute.model_runner import PrefillInputs
from treegen.model.batch import ImageRows
from treegen.model.vision import ImageEmbedding, VisionTower
from treegen.prompts.images.table import ImageTable, MRopePositions, PlacedImage

_MAX_BYTES: Final = 2**32  # on the host; the least recently used image is dropped first


class EncoderCache:
    """Caches the image embeddings of the vision tower by image digest.

    Attributes:
        table: The images.
        rotary: Rotary positions of tokens, if images have axes; None otherwise.
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
        """Return the embeddings of images among the tokens of a pass; None without images.

        They are on the host, so that they can be sent to other ranks, which have no vision tower.
        """
        if not self.table.has_images(tokens):
            return None
        positions, rows, added = [], [], []
        for image, at in self.table.pieces(tokens):
            encoded = self._get_or_encode(image)
            index = torch.from_numpy(tokens[at] - image.first)
            positions.append(at)
            rows.append(encoded.rows_ND[index])
            added.append([layer_rows[index] for layer_rows in encoded.added])
        return ImageRows(
            torch.from_numpy(np.concatenate(positions)),
            torch.cat(rows),
            tuple(torch.cat(layer) for layer in zip(*added, strict=True)),
        )

    def add_embeddings(self, inputs: PrefillInputs, usage: Usage) -> PrefillInputs:
        """Return a pass with the embeddings of its images, and with the placeholders of the model.

        Args:
            inputs: The pass, in which each image has placeholders of its own.
            usage: Where images that are encoded for it are counted.
        """
        before = self.num_encoded
        images = self.gather_rows(inputs.tokens)
        usage.images_encoded += self.num_encoded - before
        tokens = self.table.restore_placeholders(inputs.tokens)
        return replace(inputs, images=images, tokens=tokens)

    def clear(self) -> None:
        """Drop all embeddings, after the weights of the tower have changed."""
        self._encoded.clear()
        self._num_bytes = 0

    def _get_or_encode(self, image: PlacedImage) -> ImageEmbedding:
        embedding = self._encoded.get(image.digest)
        if embedding is None:
            embedding = self._tower.encode(self.table.inputs(image), image.num)
            self._encoded[image.digest] = embedding
            self._num_bytes += embedding.nbytes
            while self._num_bytes > _MAX_BYTES and len(self._encoded) > 1:
                _, dropped = self._encoded.popitem(last=False)
                self._num_bytes -= dropped.nbytes
        self._encoded.move_to_end(image.digest)
        return embedding
