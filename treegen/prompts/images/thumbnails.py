"""Thumbnails of images for pages that embed many images."""

import base64
import io
from typing import Final

from treegen.prompts.images.loading import load_image

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
