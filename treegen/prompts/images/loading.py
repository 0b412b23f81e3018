"""Images as users give them, opened and checked before anything is computed."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from treegen.common.files.regular_files import read_regular
from treegen.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats of files that are opened, as Pillow names them.

Their decoders read the bytes that they are given and nothing else. Other decoders of Pillow start
programs (EPS starts Ghostscript), hand the bytes to other libraries or read whole containers.
"""
MOST_PIXELS: Final = 2**26
"""Pixels of an image at most; a small file may claim any number (a decompression bomb)."""
MOST_BYTES: Final = 2**26
"""Bytes of an image's file at most."""
_PARTS: Final = ("image", "path", "url", "base64", "image_url")
"""Keys under which a part of a message has its image, for one program or another."""
_MODES: Final = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}

Source = Any
"""A path, a data URL, the bytes of a file, or an image of PIL."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image that a problem asks about, of which the header was read.

    path: of its file. Without one, what its data call it; may be empty.
    sha256: hex digits of a hash of the file.
    size: its width and height in pixels.
    data: the file, where it is in the task's own data.
    """

    path: str
    sha256: str
    size: tuple[int, int] = (0, 0)
    data: bytes | None = field(default=None, repr=False)

    @classmethod
    def of(cls, path: str | Path) -> ImageFile:
        """The file at a path.

        Raises:
            InputError: it is no image that can be used, as far as its header tells.
        """
        data = read_image(path)
        assert isinstance(data, bytes)
        size = open_image(data, name_of(path)).size
        return cls(str(path), hashlib.sha256(data).hexdigest(), size)

    @classmethod
    def within(cls, data: bytes | str, name: str = "") -> ImageFile:
        """The file that is given as bytes, or in a data URL. name: what its data call it.

        Raises:
            InputError: as `of`.
        """
        found = read_image(data)
        assert isinstance(found, bytes)
        size = open_image(found, f"image {name}" if name else name_of(data)).size
        return cls(name, hashlib.sha256(found).hexdigest(), size, found)

    @property
    def name(self) -> str:
        """What people call it: the name of its file; may be empty."""
        return Path(self.path).name

    @property
    def source(self) -> Source:
        """What the processor takes of it."""
        return self.path if self.data is None else self.data

    @property
    def part(self) -> dict[str, Any]:
        """It as a part of a chat message."""
        return {"type": "image", "image": self.source, "name": self.name}

    def content(self) -> bytes:
        """The bytes of the file.

        Raises:
            InputError: they are not those of before.
        """
        data = read_image(self.path) if self.data is None else self.data
        assert isinstance(data, bytes)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise InputError(
                f"image {self.path} has changed since it was first read; begin again with it"
            )
        return data


def is_image(part: object) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def source_of(part: Mapping[str, Any]) -> Source:
    """What a part of a message has for its image.

    Raises:
        InputError: it has none, or several.
    """
    found = [(key, part[key]) for key in _PARTS if part.get(key) is not None]
    if len(found) != 1:
        raise InputError(
            'an image is {"type": "image", "image": ...} with a path, a data URL, bytes or an '
            f"image of PIL, got {sorted(map(str, part))}"
        )
    key, source = found[0]
    if isinstance(source, Mapping):  # as OpenAI's chat has it
        source = source.get("url")
    if key == "base64" and isinstance(source, str):
        source = f"data:image;base64,{source}"
    is_pil = hasattr(source, "convert") and hasattr(source, "getbands")
    if not isinstance(source, str | os.PathLike | bytes) and not is_pil:
        raise InputError(
            f"an image is a {type(source).__name__}; give a path, a data URL, bytes or an image of "
            "PIL"
        )
    return source


def name_of(source: Source) -> str:
    """What messages call an image."""
    if isinstance(source, str) and source.startswith("data:"):
        return "the image in a data URL"
    if isinstance(source, bytes):
        return "the image in bytes"
    if isinstance(source, str | os.PathLike):
        return f"image {os.fspath(source)}"
    return "the image"


def describe_content(content: Any) -> Any:
    """The content of a message as people read it; images are told by their names."""
    if not isinstance(content, list | tuple):
        return content
    return "".join(
        f"[{_describe_image(part)}]\n" if is_image(part) else str(part.get("text", ""))
        for part in content
    )


def _describe_image(part: Mapping[str, Any]) -> str:
    name = part.get("name")
    return f"image {name}" if isinstance(name, str) and name else name_of(source_of(part))


def read_image(source: Source) -> bytes | Image:
    """The bytes of an image's file, or an image of PIL as it is.

    Raises:
        InputError: it cannot be read, or is too large.
    """
    name = name_of(source)
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, str) and source.startswith("data:"):
        data = _decode_data_url(source)
    elif isinstance(source, str | os.PathLike):
        data = _bytes_of(_path(os.fspath(source)), name)
    else:
        return source  # type: ignore[no-any-return]
    if not data:
        raise InputError(f"{name} is empty; give a file with an image")
    if len(data) > MOST_BYTES:
        raise InputError(f"{name} has more than {MOST_BYTES >> 20} MiB; give a smaller one")
    return data


def as_file(source: Source) -> bytes:
    """The bytes of an image's file; one that is in memory becomes a file with the same pixels.

    Raises:
        InputError: it cannot be used.
    """
    given = read_image(source)
    if isinstance(given, bytes):
        return given
    file = io.BytesIO()
    load_image(given, name_of(source)).save(file, "PNG")
    return file.getvalue()


def check_pixels(sources: Sequence[Source], most: int) -> None:
    """Check by their headers alone that images have no more pixels together than they may.

    Args:
        sources: The images as they were given.
        most: Pixels of all of them.

    Raises:
        InputError: They have more, or one cannot be used.
    """
    total = 0
    for source in sources:
        width, height = open_image(read_image(source), name_of(source)).size
        total += width * height
        if total > most:
            raise InputError(
                f"the images of the request have at least {total:,} pixels, more than "
                f"{most:,} in all; send smaller or fewer images (the server's limit is "
                "--max-image-pixels)"
            )


def load_image(given: bytes | Image, name: str) -> Image:
    """An image in RGB, turned as its file says, as transformers loads images.

    Args:
        given: From `read`.
        name: What messages call it.

    Raises:
        InputError: it is no image, is damaged, empty, animated or too large.
    """
    image = open_image(given, name)
    try:
        from PIL import ImageOps

        turned = ImageOps.exif_transpose(image)
        return turned.convert("RGB")
    except Exception as error:
        raise InputError(f"{name} is damaged: {error}; give a whole file") from None


def open_image(given: bytes | Image, name: str) -> Image:
    """An image whose header was read alone, and tells nothing that cannot be used.

    Raises:
        InputError: as `opened`, but for damage behind the header.
    """
    image = _open(given, name) if isinstance(given, bytes) else _check_pil_image(given, name)
    width, height = image.size
    if not width or not height:
        raise InputError(f"{name} has no pixels ({width} x {height}); give another")
    if width * height > MOST_PIXELS:
        raise InputError(_too_large(name, f"{width:,} x {height:,} "))
    if _is_animated(image):
        raise InputError(f"{name} is animated; give one frame")
    if image.mode not in _MODES:
        raise InputError(f"{name} has pixels of kind {image.mode}; give 8 bits a channel")
    return image


def _open(data: bytes, name: str) -> Image:
    """Return the image in a file's bytes, of which the header was read alone.

    This is the only place where treegen lets Pillow choose a decoder.

    Raises:
        InputError: the bytes are no image in one of `FORMATS`.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InputError("images need Pillow; install it (pip install pillow)") from None
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InputError(
            f"{name} is no image in a format that treegen opens ({', '.join(FORMATS)}); save it "
            "as PNG"
        ) from None
    except Image.DecompressionBombError:
        raise InputError(_too_large(name)) from None
    except Exception as error:
        raise InputError(f"{name} cannot be opened: {error}; save it again as PNG") from None


def _check_pil_image(image: Image, name: str) -> Image:
    """Return an image of PIL as it is, unless using it would start another format's decoder.

    Raises:
        InputError: it is a file in another format than `FORMATS`, and is not decoded yet.
    """
    kind = image.format
    if kind is not None and kind not in (*FORMATS, "MPO") and getattr(image, "tile", None):
        raise InputError(
            f"{name} is a {kind} file that is not decoded yet, and treegen decodes "
            f"{', '.join(FORMATS)}; call its load() first if you trust it"
        )
    return image


def _is_animated(image: Image) -> bool:
    """Return whether an image has a second frame. Frames are not counted: a file may have many."""
    # A second picture of a photograph (MPO) is another view, no motion.
    if image.format == "MPO":
        return False
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # what follows the first frame is damaged, so it is no frame
        return False


def _too_large(name: str, size: str = "") -> str:
    return f"{name} has {size}pixels, more than {MOST_PIXELS:,} in all; make it smaller"


def _decode_data_url(url: str) -> bytes:
    """The bytes in a data URL."""
    kind, comma, data = url.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise InputError("an image's data URL must begin with data:image/TYPE;base64,")
    if len(data) > MOST_BYTES * 4 // 3 + 4:
        raise InputError(
            f"an image's data URL has more than {MOST_BYTES >> 20} MiB; give a smaller image"
        )
    try:
        return base64.b64decode(unquote(data), validate=True)
    except (binascii.Error, ValueError):
        raise InputError("an image's data URL is not valid base64; encode it again") from None


def _path(text: str) -> Path:
    parts = urlsplit(text)
    if parts.scheme in ("http", "https"):
        raise InputError(f"image {text:.200} is on the network; load it first, and give a file")
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(text).expanduser()


def _bytes_of(path: Path, name: str) -> bytes:
    try:
        data = read_regular(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name} cannot be read: {reason}; give a file that can") from None
    if data is None:
        raise InputError(f"{name} cannot be read: it is no regular file; give one that is")
    return data
