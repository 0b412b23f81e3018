"""Images as users pass them, opened and checked before anything is computed."""

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

from treegen.common.files import read_regular
from treegen.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image


FORMATS: Final = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""File formats that are opened, by Pillow's names.

Their decoders read only the bytes that they get. Other decoders of Pillow start programs (EPS
starts Ghostscript), pass the bytes to other libraries or read whole containers.
"""
MAX_PIXELS: Final = 2**26
"""Maximum pixels of an image; a small file may claim any number (a decompression bomb)."""
MAX_BYTES: Final = 2**26
"""Maximum bytes of an image's file."""
_PARTS: Final = ("image", "path", "url", "base64", "image_url")
"""Keys under which the message formats of various programs store an image."""
_MODES: Final = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}

Source = Any
"""A path, a data URL, the bytes of a file, or a PIL image."""


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file of a problem, whose header has been read."""

    path: str
    """The path of its file; for an image in the task's data its name there, which may be empty."""
    sha256: str
    """Hex digits of a hash of the file."""
    size: tuple[int, int] = (0, 0)
    """Its width and height in pixels."""
    data: bytes | None = field(default=None, repr=False)
    """The file's bytes, if they are in the task's own data."""

    @classmethod
    def of(cls, path: str | Path) -> ImageFile:
        """Return the image file at a path.

        Raises:
            InputError: its header shows that it is not a usable image.
        """
        data = read_image(path)
        assert isinstance(data, bytes)
        size = open_image(data, name_of(path)).size
        return cls(str(path), hashlib.sha256(data).hexdigest(), size)

    @classmethod
    def within(cls, data: bytes | str, name: str = "") -> ImageFile:
        """Return the image file in bytes or in a data URL.

        Args:
            data: The bytes or the data URL.
            name: The image's name in the data.

        Raises:
            InputError: as for `of`.
        """
        content = read_image(data)
        assert isinstance(content, bytes)
        size = open_image(content, f"image {name}" if name else name_of(data)).size
        return cls(name, hashlib.sha256(content).hexdigest(), size, content)

    @property
    def name(self) -> str:
        """The display name: the name of its file; may be empty."""
        return Path(self.path).name

    @property
    def source(self) -> Source:
        """The path or the bytes, for the image processor."""
        return self.path if self.data is None else self.data

    @property
    def part(self) -> dict[str, Any]:
        """The image as a part of a chat message."""
        return {"type": "image", "image": self.source, "name": self.name}

    def content(self) -> bytes:
        """Return the bytes of the file.

        Raises:
            InputError: the file has changed since its header was read.
        """
        data = read_image(self.path) if self.data is None else self.data
        assert isinstance(data, bytes)
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise InputError(
                f"image {self.path} has changed since treegen first read the file; start the "
                "run again"
            )
        return data


def is_image(part: object) -> bool:
    """Whether a part of a message's content is an image."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def source_of(part: Mapping[str, Any]) -> Source:
    """Return the image source in a part of a message.

    Raises:
        InputError: the part has no image, or several.
    """
    sources = [(key, part[key]) for key in _PARTS if part.get(key) is not None]
    if len(sources) != 1:
        raise InputError(
            'an image part must be {"type": "image", "image": ...} with a path, a data URL, bytes '
            f"or a PIL image, got the keys {sorted(map(str, part))}"
        )
    key, source = sources[0]
    if isinstance(source, Mapping):  # the form of OpenAI's chat API
        source = source.get("url")
    if key == "base64" and isinstance(source, str):
        source = f"data:image;base64,{source}"
    is_pil = hasattr(source, "convert") and hasattr(source, "getbands")
    if not isinstance(source, str | os.PathLike | bytes) and not is_pil:
        raise InputError(
            "an image must be a path, a data URL, bytes or a PIL image, got "
            f"{type(source).__name__}"
        )
    return source


def name_of(source: Source) -> str:
    """Return an image's name for error messages."""
    if isinstance(source, str) and source.startswith("data:"):
        return "the image in a data URL"
    if isinstance(source, bytes):
        return "the image in bytes"
    if isinstance(source, str | os.PathLike):
        return f"image {os.fspath(source)}"
    return "the image"


def describe_content(content: Any) -> Any:
    """Return the content of a message for display, with names in place of images."""
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
    """Return the bytes of an image's file, or a PIL image unchanged.

    Raises:
        InputError: it cannot be read, or is too large.
    """
    name = name_of(source)
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, str) and source.startswith("data:"):
        data = _decode_data_url(source)
    elif isinstance(source, str | os.PathLike):
        data = _bytes_of(os.fspath(source), name)
    else:
        return source  # type: ignore[no-any-return]
    if not data:
        raise InputError(f"{name} is empty; pass a file that contains an image")
    if len(data) > MAX_BYTES:
        raise InputError(f"{name} is larger than {MAX_BYTES >> 20} MiB; pass a smaller image")
    return data


def as_file(source: Source) -> bytes:
    """Return the bytes of an image's file; an image in memory is encoded without loss.

    Raises:
        InputError: it cannot be used.
    """
    content = read_image(source)
    if isinstance(content, bytes):
        return content
    file = io.BytesIO()
    load_image(content, name_of(source)).save(file, "PNG")
    return file.getvalue()


def check_pixels(sources: Sequence[Source], max_pixels: int) -> None:
    """Check the total number of pixels of images, reading only their headers.

    Args:
        sources: The images as the user passed them.
        max_pixels: Maximum pixels of all of them together.

    Raises:
        InputError: they have more, or one cannot be used.
    """
    total = 0
    for source in sources:
        width, height = open_image(read_image(source), name_of(source)).size
        total += width * height
        if total > max_pixels:
            raise InputError(
                f"the images of the request have at least {total:,} pixels in total, but the limit "
                f"is {max_pixels:,}; send smaller or fewer images (--max-image-pixels sets the "
                "limit of the server)"
            )


def load_image(content: bytes | Image, name: str) -> Image:
    """Return an image in RGB, rotated as its file says, as transformers loads images.

    Args:
        content: The result of `read_image`.
        name: The image's name in error messages.

    Raises:
        InputError: it is not an image, is corrupt, empty, animated or too large.
    """
    image = open_image(content, name)
    try:
        from PIL import ImageOps

        turned = ImageOps.exif_transpose(image)
        return turned.convert("RGB")
    except Exception as error:
        raise InputError(f"{name} is corrupt: {error}; pass an intact file") from None


def open_image(content: bytes | Image, name: str) -> Image:
    """Return an image after reading and checking only its header.

    Args:
        content: The result of `read_image`.
        name: The image's name in error messages.

    Raises:
        InputError: as for `load_image`, except for damage after the header.
    """
    image = _open(content, name) if isinstance(content, bytes) else _check_pil_image(content, name)
    width, height = image.size
    if not width or not height:
        raise InputError(f"{name} has no pixels ({width} x {height}); pass another image")
    if width * height > MAX_PIXELS:
        raise InputError(_too_large(name, f" ({width:,} x {height:,})"))
    if _is_animated(image):
        raise InputError(f"{name} is animated, which is not supported; pass a single frame")
    if image.mode not in _MODES:
        raise InputError(
            f"{name} has the image mode {image.mode}, which is not supported; convert the "
            "image to 8 bits per channel"
        )
    return image


def _open(data: bytes, name: str) -> Image:
    """Return the image in a file's bytes, after reading only its header.

    This is the only place where treegen lets Pillow choose a decoder.

    Raises:
        InputError: the bytes are not an image in one of `FORMATS`.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InputError("images need Pillow; install it (pip install pillow)") from None
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise InputError(
            f"{name} is not an image in a supported format ({', '.join(FORMATS)}); save the image "
            "as PNG"
        ) from None
    except Image.DecompressionBombError:
        raise InputError(_too_large(name)) from None
    except Exception as error:
        raise InputError(f"{name} cannot be opened: {error}; save the image again as PNG") from None


def _check_pil_image(image: Image, name: str) -> Image:
    """Return a PIL image unchanged if using it starts no decoder of another format.

    Raises:
        InputError: it is a file in a format outside `FORMATS` and not decoded yet.
    """
    kind = image.format
    if kind is not None and kind not in (*FORMATS, "MPO") and getattr(image, "tile", None):
        raise InputError(
            f"{name} is a {kind} image that is not decoded yet, but treegen decodes only "
            f"{', '.join(FORMATS)}; if you trust the image, call its load() method first"
        )
    return image


def _is_animated(image: Image) -> bool:
    """Whether an image has a second frame. Frames are not counted, because a file may have many."""
    # The second picture of a photograph (MPO) is another view, not animation.
    if image.format == "MPO":
        return False
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # data after the first frame is corrupt, so there is no second frame
        return False


def _too_large(name: str, size: str = "") -> str:
    return f"{name} has more than {MAX_PIXELS:,} pixels{size}; pass a smaller image"


def _decode_data_url(url: str) -> bytes:
    """Return the bytes in a data URL."""
    kind, comma, data = url.partition(",")
    if not comma or not kind.endswith(";base64"):
        raise InputError("the data URL of an image must begin with data:image/TYPE;base64,")
    if len(data) > MAX_BYTES * 4 // 3 + 4:
        raise InputError(
            f"the data URL of an image is larger than {MAX_BYTES >> 20} MiB; pass a smaller image"
        )
    try:
        return base64.b64decode(unquote(data), validate=True)
    except (binascii.Error, ValueError):
        raise InputError(
            "the data URL of an image is not valid base64; encode the image again"
        ) from None


def _path(text: str) -> Path:
    parts = urlsplit(text)
    if parts.scheme in ("http", "https"):
        raise InputError(
            f"image {text:.200} is a URL, which is not supported; download the image, and pass the "
            "path of the file"
        )
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(text).expanduser()


def _bytes_of(text: str, name: str) -> bytes:
    try:
        data = read_regular(_path(text), MAX_BYTES)
    except InputError:
        raise
    # The text may be no valid URL, and `~name` may name no user.
    except (OSError, ValueError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{name} cannot be read: {reason}; pass a readable file") from None
    if data is None:
        raise InputError(f"{name} is not a regular file; pass the path of a regular file")
    return data


_SIDE: Final = 360  # pixels
_QUALITY: Final = 80


def thumbnail(data: bytes, name: str) -> str:
    """Return the image in a file's bytes as a data URL, at most 360 pixels wide and high.

    Args:
        data: The bytes of the file.
        name: The image's name in error messages.

    Raises:
        InputError: the image cannot be used, or Pillow is not installed.
    """
    picture = load_image(data, name)
    picture.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=_QUALITY, optimize=True)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"
