"""Records as lines: many that are decoded at once are what each is on its own."""

import random
import zlib
from collections.abc import Iterator

import pytest

from treegen.errors import RunError
from treegen.runs import record_format as lines_module
from treegen.runs.record_format import decode_record, decode_records, encode_record


def line_of(body: str) -> bytes:
    """A line with a right crc, whatever its JSON is."""
    return b'%b,"crc":"%08x"}\n' % (body[:-1].encode(), zlib.crc32(body.encode()))


def outcomes(found: Iterator[object]) -> list[object]:
    """What comes before the first error, and the error."""
    seen: list[object] = []
    try:
        seen.extend(found)
    except ValueError as error:
        seen.append(str(error))
    return seen


def draw(rng: random.Random) -> dict[str, object]:
    text = "".join(rng.choice('ab \n"\\{}[],:é\U0001f600\ud83d') for _ in range(rng.randrange(9)))
    record = {"problem_id": f"p{rng.randrange(9)}", "sample_index": rng.randrange(9), "text": text}
    if rng.random() < 0.5:
        record |= {"num_tokens": rng.randrange(9), "thinking": None, "stop": rng.choice(["x", 3])}
    return record


GOOD = [encode_record({"problem_id": "p", "sample_index": i, "text": "x"}) for i in range(3)]
ONE = '{"problem_id":"p","sample_index":7,"text":"x"}'
CRAFTED = [
    # Lines that are no value each, but several or none, and together as many as there are lines.
    [line_of(f"{ONE},{ONE}"), line_of('{"problem_id":[1}'), line_of("{2]}")],
    [line_of(f"{ONE},null,{ONE}"), line_of('{"problem_id":[1}'), line_of("{2]}")],
    [line_of(f'{ONE},"{"0" * 32}",{ONE}'), line_of('{"problem_id":[1}'), line_of("{2]}")],
    [line_of('{"problem_id":"p","sample_index":1,"text":"}'), line_of('{"}')],
    [line_of("{}"), GOOD[0]],
    [line_of("[1]}"), GOOD[0]],
    [GOOD[0], line_of('{"problem_id":"p","sample_index":true}')],
    [GOOD[0], line_of('{"problem_id":"p","sample_index":1,"text":NaN}'), GOOD[1]],
    [GOOD[0], line_of('{"problem_id":"p","sample_index":1,"num_tokens":"4"}'), GOOD[1]],
    [GOOD[0], line_of(f'{{"problem_id":"p","sample_index":1,"seed":{2**64}}}'), GOOD[1]],
    [GOOD[0], GOOD[1].replace(b"x", b"y"), GOOD[2]],
    [GOOD[0], GOOD[1].removesuffix(b"\n")],
    [GOOD[0], b"\n", GOOD[1]],
    [line_of(f'{{"problem_id":"p","sample_index":1,"text":{"[" * 9000}{"]" * 9000}}}'), GOOD[0]],
]


@pytest.mark.parametrize("case", range(len(CRAFTED)))
def test_decoding_crafted_lines_together_equals_decoding_each(case: int) -> None:
    assert outcomes(decode_records(CRAFTED[case])) == outcomes(map(decode_record, CRAFTED[case]))


@pytest.mark.parametrize("seed", range(10))
def test_decoding_lines_together_equals_decoding_each(seed: int) -> None:
    rng = random.Random(seed)
    records = [draw(rng) for _ in range(rng.randrange(1, 60))]
    lines = [encode_record(record) for record in records]
    assert list(decode_records(lines)) == records == list(map(decode_record, lines))
    for _ in range(20):  # a byte changes, or a line goes on in the next
        hurt = list(lines)
        place = rng.randrange(len(hurt))
        at = rng.randrange(len(hurt[place]))
        hurt[place] = hurt[place][:at] + bytes([rng.randrange(32, 127)]) + hurt[place][at + 1 :]
        assert outcomes(decode_records(hurt)) == outcomes(map(decode_record, hurt))


def test_good_lines_are_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "decode_record", lambda _: pytest.fail("one by one"))
    assert len(list(decode_records(GOOD))) == 3
    assert list(decode_records([])) == []


def test_a_missing_search_number_is_an_error() -> None:
    line = encode_record({"problem_id": "7", "sample_index": 0, "usage": {"calls": 1}})
    for record in (decode_record(line), *decode_records([line])):
        assert record["usage"] == {"calls": 1}
        with pytest.raises(
            RunError, match=r"'7', sample 0, has no 'usage\.tokens', because the file was edited"
        ):
            assert record["usage"]["tokens"]
