"""Arguments and return values as JSON that keeps Python's types; used inside and outside a sandbox.

None, bool, float, str, list and small int are written as they are. Other types are {"int": hex},
{"complex": [real, imaginary]}, {"fraction": [numerator, denominator]}, {"decimal": digits},
{"tuple": [...]}, {"set": [...]}, {"dict": [[key, value], ...]} and {"numpy": [type, dimensions,
item]}, which is a numpy scalar if `dimensions` is null, otherwise an array of one element.

A hostile program may have written the text that `loads` reads. So `loads` takes linear time and
builds only plain data. It builds numpy values only on request, because the comparison of an array
may raise ValueError.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

_MAX_PLAIN_INT = 1 << 60
_MAX_DEPTH = 100
_MAX_INT_CHARS = 41_600  # about 50,000 decimal digits
_MAX_DIGITS = 4_000  # of a decimal; also the maximum bits of a fraction's parts
# A dict takes quadratic time to build if its keys were chosen to share a hash. Few keys share one
# by chance: the hashes of -1 and -2 are equal, so up to 16 points of four coordinates may share a
# hash.
_MAX_SAME_HASH = 16
_MAX_LONGDOUBLE_CHARS = 64  # characters of a long double
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64")
# Types of numpy and the Python types of their items. No item is a list, so arrays have one element.
_NUMPY_TYPES: dict[str, Any] = {
    "bool": bool,
    **dict.fromkeys(_INTEGERS, int),
    **dict.fromkeys(_FLOATS, float),
    **dict.fromkeys(("complex64", "complex128"), complex),
    "longdouble": str,
    "str": str,
    "object": object,
}


def dumps(value: object) -> str:
    """Write a value as one line of JSON; raise TypeError for values that are not plain data."""
    return json.dumps(_pack(value))


def loads(text: str, *, allow_numpy: bool = False) -> Any:
    """Read a text from `dumps`.

    Args:
        text: The text.
        allow_numpy: Whether it may contain numpy scalars and arrays.

    Raises:
        ValueError: `dumps` does not write such a text.
    """
    try:
        # json uses one nan object for all, and identical objects count as equal inside of lists. So
        # each nan is made anew.
        hook = None if allow_numpy else _reject_numpy
        packed = json.loads(text, parse_int=_small_int, parse_constant=float, object_hook=hook)
        return _unpack(packed, 0)
    except (RecursionError, TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"not an encoded value: {type(error).__name__}") from None


def _pack(value: Any) -> Any:
    if value is None or isinstance(value, bool | str | float):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _MAX_PLAIN_INT else {"int": hex(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list):
        return [_pack(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_pack(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"set": [_pack(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_pack(key), _pack(item)] for key, item in value.items()]}
    # A program that has not imported these modules cannot have their values.
    if "fractions" in sys.modules and isinstance(value, sys.modules["fractions"].Fraction):
        return {"fraction": [_pack(int(value.numerator)), _pack(int(value.denominator))]}
    if "decimal" in sys.modules and isinstance(value, sys.modules["decimal"].Decimal):
        return {"decimal": str(value)}
    if hasattr(value, "treegen_numpy"):  # an object that represents one of numpy
        return {"numpy": [_pack(item) for item in value.treegen_numpy]}
    if hasattr(value, "tolist"):  # numpy arrays and scalars
        return _pack(value.tolist())
    raise TypeError(f"{type(value).__name__} is not plain data")


def _reject_numpy(item: dict[str, Any]) -> dict[str, Any]:
    if "numpy" in item:
        raise ValueError("values of numpy cannot be compared")
    return item


def _small_int(text: str) -> int:
    if len(text) > 20:
        raise ValueError("an int with more than 20 characters must be written in hex")
    return int(text)


def _unpack(value: Any, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")
    if isinstance(value, list):
        return [_unpack(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == "int":
        if len(body) > _MAX_INT_CHARS:
            raise ValueError("an int of more than 50,000 digits")
        return int(body, 16)
    if kind == "complex":
        real, imaginary = body
        return complex(float(real), float(imaginary))
    if kind == "fraction":
        return _fraction(*[_unpack(part, depth + 1) for part in body])
    if kind == "decimal":
        return _decimal(body)
    if kind == "tuple":
        return tuple([_unpack(item, depth + 1) for item in body])
    if kind == "set":
        return set(_unpack_keys(body, depth))
    if kind == "dict":
        keys = _unpack_keys([key for key, _ in body], depth)
        return dict(zip(keys, [_unpack(item, depth + 1) for _, item in body], strict=True))
    if kind == "numpy":
        name, dimensions, item = body
        return _numpy(name, dimensions, _unpack(item, depth + 1))
    raise ValueError("an unknown kind of value")


def _numpy(name: Any, dimensions: Any, item: Any) -> Any:
    import numpy as np

    if name not in _NUMPY_TYPES:
        raise ValueError("not a type of numpy that can be compared")
    if dimensions is not None and (type(dimensions) is not int or not 0 <= dimensions <= 32):
        raise ValueError("invalid number of dimensions")
    if not isinstance(item, _NUMPY_TYPES[name]) or isinstance(item, list | tuple | set | dict):
        raise ValueError(f"not a valid value for numpy type {name}")
    if name == "longdouble" and len(item) > _MAX_LONGDOUBLE_CHARS:
        raise ValueError(f"a long double of more than {_MAX_LONGDOUBLE_CHARS} characters")
    with np.errstate(all="ignore"):
        array = np.array(item, dtype=name).reshape((1,) * (dimensions or 0))
    return array[()] if dimensions is None else array


def _fraction(numerator: Any, denominator: Any) -> Any:
    from fractions import Fraction

    if type(numerator) is not int or type(denominator) is not int or denominator < 1:
        raise ValueError("not a fraction")
    # Computing a common divisor takes quadratic time.
    if max(numerator.bit_length(), denominator.bit_length()) > _MAX_DIGITS:
        raise ValueError(f"a fraction of more than {_MAX_DIGITS:,} bits")
    return Fraction(numerator, denominator)


def _decimal(text: Any) -> Any:
    from decimal import Decimal, DecimalException

    if not isinstance(text, str):  # Decimal would also accept a tuple of digits
        raise ValueError("not a decimal")
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a decimal of more than {_MAX_DIGITS:,} digits")
    try:
        number = Decimal(text)
    except DecimalException:
        raise ValueError("not a decimal") from None
    if number.is_snan():
        raise ValueError("a signaling nan, which cannot be compared")
    return number


def _unpack_keys(body: Any, depth: int) -> list[Any]:
    keys = [_unpack(key, depth + 1) for key in body]
    # Keys with different hashes are cheap, however they are chosen.
    if max(Counter(map(hash, keys)).values(), default=0) > _MAX_SAME_HASH:
        raise ValueError(f"more than {_MAX_SAME_HASH} keys of one hash")
    return keys
