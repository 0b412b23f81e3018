"""The types of records: a look at a record's shape refuses what a look at each field does."""

import random
from typing import Any

import pytest

from treegen.runs.record_format import RECORD, check_record, check_types

_VALUES: list[Any] = [
    "text",
    None,
    True,
    False,
    0,
    7,
    -3,
    2**64 - 1,
    2**64,
    -(2**64),
    1 - 2**64,
    10**40,
    0.5,
    -1.0,
    [],
    {},
    [1],
    [0.5],
    ["a"],
    [True],
    [2**64],
    {"a": 1},
    {"a": "b"},
    {"a": 2**70},
    [{}],
    [{"id": 1}],
    [{"id": "1"}],
    [{"id": 2**64}],
]


def _error_message(check: Any, *given: Any) -> str | None:
    try:
        check(*given)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", range(20))
def test_records_are_refused_as_field_by_field(seed: int) -> None:
    rng = random.Random(seed)
    names = [*RECORD, "problem_id", "sample_index", "other"]
    refused = 0
    for _ in range(500):
        record = {name: rng.choice(_VALUES) for name in rng.sample(names, rng.randrange(4))}
        message = _error_message(check_types, record, RECORD)
        assert (
            _error_message(check_record, record) == message == _error_message(check_record, record)
        )
        refused += message is not None
    assert 100 < refused < 450


def test_a_record_of_a_known_shape_is_still_refused_for_its_size() -> None:
    record = {"problem_id": "a", "sample_index": 0, "seed": 1, "text": "", "num_tokens": 2}
    check_record(record)
    for name in ("seed", "num_tokens"):
        for value in (2**64, -(2**64)):
            with pytest.raises(ValueError, match=f"{name} must be int of at most 64 bits"):
                check_record(record | {name: value})
        check_record(record | {name: 2**64 - 1})
