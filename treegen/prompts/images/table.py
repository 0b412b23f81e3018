"""Images among token ids: each placeholder token has an id that no other image uses.

A transformers processor turns an image into the inputs of the vision tower and into a text for the
prompt. In that text one token, the placeholder, is repeated; the tower's output replaces it.
treegen finds shared prefixes by comparing token ids, so the n-th placeholder of an image gets its
own id past the vocabulary, derived from a hash of the image's pixels and of the processor's
settings. So prompts with the same image share its tokens, and two images never have the same ids.
The model receives the id of the placeholder.
"""

from __future__ import annotations

import hashlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from treegen.errors import CapacityError, InputError
from treegen.prompts.images.loading import Source, as_file, load_image, name_of, read_image

if TYPE_CHECKING:
    from PIL.Image import Image

Ids = NDArray[np.int32]
Ahead = Literal["all", "windowed"]
"""Layers in which image tokens attend to later ones: all, or those with a window."""
_MAX_ID: Final = 2**31 - 1
_MAX_INPUT_BYTES: Final = 2**31
"""Bytes of images and processor outputs that are kept because prompts may need them again."""
_NOT_IMAGE: Final = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "text_replacement_offsets",
)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class PlacedImage:
    """An image that prompts may contain."""

    digest: str
    """Hex digits of a hash over its pixels and the processor's settings."""
    first: int
    """The id of its first placeholder; the others follow."""
    num: int
    """Number of placeholders."""
    text: str
    """Its text in a prompt."""
    size: tuple[int, int]
    """Its width and height in pixels."""
    source: Source
    """The image as the user passed it."""


class ImageTable:
    """The images of one model, by digest.

    Attributes:
        marker: The text that marks an image in a rendered chat.
        placeholder: The id that the model sees at the positions of an image.
        chat_template: The processor's; None if the tokenizer's is used.
        rotary: Positions for rotary embeddings of several axes; None if positions count tokens.
        blocks: Image tokens that attend to later tokens of their image; None if they never do.
        keeps_all: Whether every image stays. If not, the table drops images to which neither
            requests nor segments refer, except the most recent ones.
    """

    def __init__(
        self, processor: Any, placeholder: int, vocab_size: int, *, sees_ahead: Ahead | None = None
    ) -> None:
        """Create a table without images.

        Args:
            processor: A transformers processor.
            placeholder: The token id that the model sees at the positions of an image.
            vocab_size: Number of the model's token ids.
            sees_ahead: Layers in which image tokens attend to later tokens of their image; None for
                none.
        """
        self._processor = processor
        self.marker: str = processor.image_token
        self.placeholder, self.vocab_size = placeholder, vocab_size
        self.chat_template: str | None = getattr(processor, "chat_template", None)
        self.rotary: MRopePositions | None = None
        self.blocks: BidirectionalBlocks | None = None
        self.keeps_all = True  # callers of an LLM may hold token ids alone
        if sees_ahead is not None:
            self.blocks = BidirectionalBlocks(self, windowed=sees_ahead == "windowed")
        settings = json.dumps(processor.image_processor.to_dict(), sort_keys=True, default=str)
        self._settings = settings.encode()
        # Two locks, because processing may take seconds, and the engine reads images meanwhile.
        self._processing, self._lock = threading.Lock(), threading.Lock()
        self._by_digest: weakref.WeakValueDictionary[str, PlacedImage] = (
            weakref.WeakValueDictionary()
        )
        self._cached: weakref.WeakValueDictionary[bytes, PlacedImage] = (
            weakref.WeakValueDictionary()
        )
        self._kept: set[PlacedImage] = set()
        self._recent: dict[str, PlacedImage] = {}  # those whose inputs are cached, by digest
        self._inputs: OrderedDict[str, dict[str, Any]] = OrderedDict()
        # Images sorted by first id, and these ids. Replaced together, because threads read both.
        self._placed: tuple[list[weakref.ref[PlacedImage]], NDArray[np.int64]] = (
            [],
            np.empty(0, np.int64),
        )

    def add(self, source: Source) -> PlacedImage:
        """Return the table's entry of an image, which is processed only the first time.

        Raises:
            InputError: it cannot be used.
        """
        content = read_image(source)
        key = hashlib.sha256(content).digest() if isinstance(content, bytes) else b""
        image = self._cached.get(key)
        if image is None:
            with self._processing:
                image = self._cached.get(key)  # another thread may have processed it meanwhile
                if image is None:
                    image = self._add(source, load_image(content, name_of(source)))
                    if key:
                        self._cached[key] = image
        if self.keeps_all:
            self._kept.add(image)
        return image

    def inputs(self, image: PlacedImage) -> Mapping[str, Any]:
        """Return the vision tower's inputs for an image; processes it again if they were evicted.

        Raises:
            InputError: its file has changed.
        """
        with self._lock:
            cached = self._inputs.get(image.digest)
        if cached is not None:
            return cached
        with self._processing:
            picture = load_image(read_image(image.source), name_of(image.source))
            if self._digest(picture) != image.digest:
                raise InputError(
                    f"{name_of(image.source)} has changed since treegen first read the file; "
                    "start the run again"
                )
            return self._process(image.digest, picture, image.source)[2]

    def replace_placeholders(self, tokens: Ids, images: Sequence[PlacedImage], name: str) -> Ids:
        """Return token ids with the ids of images in place of placeholders.

        Args:
            tokens: The token ids of the prompt's text, `[tokens]`.
            images: The images of the prompt, in order.
            name: The prompt's name in error messages.

        Raises:
            InputError: the text itself contains placeholders.
        """
        at = np.flatnonzero(tokens == self.placeholder)
        if len(at) != sum(image.num for image in images):
            raise InputError(
                f"prompt {name!r} has {len(at)} image placeholder tokens, but its images need "
                f"{sum(image.num for image in images)}; remove {self.marker!r} from the text of "
                "the prompt"
            )
        placed = tokens.copy()
        if images:
            ids = [np.arange(image.first, image.first + image.num) for image in images]
            placed[at] = np.concatenate(ids).astype(np.int32)
        return placed

    def has_images(self, tokens: NDArray[Any]) -> bool:
        """Whether there are images among token ids."""
        return len(tokens) > 0 and int(tokens.max()) >= self.vocab_size

    def restore_placeholders(self, tokens: NDArray[Any]) -> NDArray[Any]:
        """Return token ids as the model sees them.

        Raises:
            KeyError: an id belongs to no image.
        """
        if not self.has_images(tokens):
            return tokens
        for _ in self.pieces(tokens):
            pass
        return np.where(tokens >= self.vocab_size, self.placeholder, tokens)

    def pieces(self, tokens: NDArray[Any]) -> Iterator[tuple[PlacedImage, NDArray[np.int64]]]:
        """Yield the images among token ids and the positions of their tokens, in order.

        Raises:
            KeyError: an id belongs to no image.
        """
        at = np.flatnonzero(tokens >= self.vocab_size)
        if not len(at):
            return
        images, firsts = self._placed
        which = np.searchsorted(firsts, tokens[at], side="right") - 1
        cuts = np.flatnonzero((np.diff(which) != 0) | (np.diff(tokens[at]) <= 0)) + 1
        for positions in np.split(at, cuts):
            token = int(tokens[positions[-1]])
            index = int(np.searchsorted(firsts, token, side="right")) - 1
            image = images[index]() if index >= 0 else None
            if image is None or token >= image.first + image.num:
                raise KeyError(token)
            yield image, positions

    def export_images(self, prompts: Iterable[NDArray[Any]]) -> tuple[PlacedImage, ...]:
        """Return the images among prompts' token ids, with their files, for other processes."""
        return tuple(
            replace(image, source=as_file(image.source)) for image in self.images_in(prompts)
        )

    def images_in(self, prompts: Iterable[NDArray[Any]]) -> list[PlacedImage]:
        """Return the images among prompts' token ids, each once."""
        images = {image.digest: image for ids in prompts for image, _ in self.pieces(ids)}
        return list(images.values())

    def import_images(self, images: Iterable[PlacedImage]) -> None:
        """Add images that another process has sent, with the ids that they have there.

        Raises:
            CapacityError: other images have these ids here.
        """
        with self._lock:
            for image in images:
                known_image = self._by_digest.get(image.digest)
                first = self._find_free(image.first, image.num, self._list_alive())
                if known_image is None and first == image.first:
                    known_image = self._insert(image)
                if known_image is None or known_image.first != image.first:
                    raise CapacityError("the cluster has too many images; create a new Cluster")
                self._kept.add(known_image)

    def _add(self, source: Source, picture: Image) -> PlacedImage:
        digest = self._digest(picture)
        known = self._by_digest.get(digest)
        if known is not None:
            return known
        text, num, _ = self._process(digest, picture, source)
        with self._lock:
            known = self._by_digest.get(digest)
            if known is not None:  # another process has sent it meanwhile
                return known
            first = self._allocate_ids(int(digest[:16], 16), num)
            return self._insert(PlacedImage(digest, first, num, text, picture.size, source))

    def _insert(self, image: PlacedImage) -> PlacedImage:
        """Add an image, and forget the ids of dropped ones."""
        if not self.keeps_all:
            self._recent[image.digest] = image
        self._by_digest[image.digest] = image
        images = sorted([*self._list_alive(), image], key=lambda placed: placed.first)
        self._placed = (
            [weakref.ref(placed) for placed in images],
            np.array([placed.first for placed in images]),
        )
        return image

    def _list_alive(self) -> list[PlacedImage]:
        return [image for ref in self._placed[0] if (image := ref()) is not None]

    def _allocate_ids(self, number: int, num: int) -> int:
        """Return the first of `num` consecutive free ids, searching from the hash `number`."""
        num_starts = _MAX_ID + 1 - self.vocab_size - num
        first, images = self.vocab_size + number % num_starts, self._list_alive()
        for _ in range(2):  # the second search starts at the lowest id
            first = self._find_free(first, num, images)
            if first + num <= _MAX_ID + 1:
                return first
            first = self.vocab_size
        raise CapacityError("no token ids are left for another image; create a new LLM")

    @staticmethod
    def _find_free(first: int, num: int, images: Sequence[PlacedImage]) -> int:
        """Return the first of `num` consecutive ids at or after `first` that no image has."""
        for image in images:
            if image.first < first + num and first < image.first + image.num:
                first = image.first + image.num
        return first

    def _digest(self, picture: Image) -> str:
        digest = hashlib.sha256(self._settings)
        digest.update(f"{picture.mode} {picture.size}".encode())
        digest.update(picture.tobytes())
        return digest.hexdigest()

    def _process(
        self, digest: str, picture: Image, source: Source
    ) -> tuple[str, int, Mapping[str, Any]]:
        """Process an image.

        Returns:
            Its text in a prompt, the number of placeholders in it, and the inputs of the tower.
        """
        try:
            outputs = self._processor(
                images=[picture],
                text=[self.marker],
                return_text_replacement_offsets=True,
                return_tensors="pt",
            )
            num = int((outputs["input_ids"] == self.placeholder).sum())
            # Some processors of older versions only repeat the marker, and do not say so.
            text, offsets = self.marker * num, outputs.get("text_replacement_offsets")
            if offsets is not None:
                text = offsets[0][0]["replacement"]
        except Exception as error:  # a processor may raise anything
            raise InputError(
                f"the model's processor rejects {name_of(source)}: {error}; pass an image of "
                "another size"
            ) from error
        if not num:
            raise InputError(
                f"the model's processor produces no tokens for {name_of(source)}; pass a "
                "larger image"
            )
        inputs = {key: outputs[key] for key in outputs if key not in _NOT_IMAGE}
        with self._lock:
            self._inputs[digest] = inputs
            while len(self._inputs) > 1 and self._count_cached_bytes() > _MAX_INPUT_BYTES:
                dropped, _ = self._inputs.popitem(last=False)
                self._recent.pop(dropped, None)
        return text, num, inputs

    def _count_cached_bytes(self) -> int:
        inputs = (value for inputs in self._inputs.values() for value in inputs.values())
        num_bytes: int = sum(getattr(value, "nbytes", 0) for value in inputs)
        return num_bytes + sum(_count_bytes(image.source) for image in self._recent.values())


class BidirectionalBlocks:
    """Runs of image tokens in which each token attends to all tokens of the run.

    Attributes:
        windowed: Whether this holds only in layers with a window.
    """

    def __init__(self, table: ImageTable, *, windowed: bool) -> None:
        self._table, self.windowed = table, windowed

    def of(self, tokens: NDArray[Any]) -> list[tuple[int, int]]:
        """Return the start and the end of each run among token ids."""
        is_image = np.concatenate([[False], tokens >= self._table.vocab_size, [False]])
        edges = np.flatnonzero(is_image[1:] != is_image[:-1])
        return [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]

    def around(self, tokens: NDArray[Any], cut: int) -> tuple[int, int]:
        """Return the run that a cut between token ids would divide; (cut, cut) if there is none."""
        if not 0 < cut < len(tokens) or min(tokens[cut - 1 : cut + 1]) < self._table.vocab_size:
            return cut, cut
        return next((low, high) for low, high in self.of(tokens) if low < cut < high)

    def check(self, name: str, tokens: NDArray[Any]) -> None:
        """Check that images are whole and separated.

        Args:
            name: The prompt's name in error messages.
            tokens: The prompt's token ids.

        Raises:
            KeyError: an id belongs to no image.
            InputError: an image is cut or adjacent to another, so its keys would depend on later
                tokens.
        """
        for image, positions in self._table.pieces(tokens):
            first = int(positions[0])
            is_apart = not first or tokens[first - 1] < self._table.vocab_size
            if len(positions) < image.num or not is_apart:
                raise InputError(
                    f"prompt {name!r} contains an incomplete image, or adjacent images without "
                    "text between them; this model needs complete images, because all tokens of an "
                    "image attend to each other; pass complete images, with text between them"
                )


class MRopePositions:
    """Positions of tokens in models whose images have several position axes (M-RoPE).

    Text after an image continues after the image's largest position. So from there on, positions
    differ from token indices by a shift. The shift of an image token is that at the start of its
    image.
    """

    def __init__(self, table: ImageTable, of_image: Any) -> None:
        """Create positions.

        Args:
            table: The images of the model.
            of_image: Function that returns the positions [3, n] of a single image, from 0.
        """
        self._table, self._of_image = table, of_image
        self._positions: weakref.WeakKeyDictionary[PlacedImage, NDArray[np.int64]] = (
            weakref.WeakKeyDictionary()
        )

    def after(self, tokens: NDArray[Any], shift: int) -> int:
        """Return the shift after tokens, given the shift before them."""
        if self._table.has_images(tokens):
            for image, positions in self._table.pieces(tokens):
                if int(tokens[positions[-1]]) == image.first + image.num - 1:
                    shift += self._advance(image) - image.num
        return shift

    def is_plain(self, tokens: NDArray[Any], shift: int) -> bool:
        """Whether the positions of tokens equal their indices."""
        return not shift and not self._table.has_images(tokens)

    def positions(self, tokens: NDArray[Any], start: int, shift: int) -> NDArray[np.int64]:
        """Return the positions [3, T] of tokens.

        Args:
            tokens: The token ids, `[T]`.
            start: Index of the first token in its text.
            shift: The shift of the first token.
        """
        plain_positions_T = np.arange(start, start + len(tokens))
        positions_3T = np.broadcast_to(plain_positions_T + shift, (3, len(tokens))).copy()
        if not self._table.has_images(tokens):
            return positions_3T
        for image, at in self._table.pieces(tokens):
            index = tokens[at].astype(np.int64) - image.first
            begin = start + int(at[0]) - int(index[0]) + shift
            positions_3T[:, at] = begin + self._of(image)[:, index]
            if index[-1] == image.num - 1:
                shift += self._advance(image) - image.num
                positions_3T[:, at[-1] + 1 :] = plain_positions_T[at[-1] + 1 :] + shift
        return positions_3T

    def _of(self, image: PlacedImage) -> NDArray[np.int64]:
        if image not in self._positions:
            self._positions[image] = self._of_image(self._table.inputs(image), image.num)
        return self._positions[image]

    def _advance(self, image: PlacedImage) -> int:
        return int(self._of(image).max()) + 1


def _count_bytes(source: Source) -> int:
    """Return about how many bytes of memory an image takes as the user passed it."""
    if isinstance(source, str | bytes):
        return len(source)
    width, height = getattr(source, "size", (0, 0))
    return 4 * width * height
