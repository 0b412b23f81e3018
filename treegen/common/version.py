"""The version, for modules that must not import the package that imports them."""

from typing import Final

VERSION: Final = "0.1.0"
