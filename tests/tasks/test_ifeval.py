"""IFEval's checks against lm-eval's copy of the published code, hostile answers, and the report."""

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cli_cases import write_data

from treegen.common.bounded import patterns
from treegen.errors import DataError, InputError
from treegen.tasks import Problem, ReportOptions, SampleScore, TaskOptions
from treegen.tasks.ifeval import checks
from treegen.tasks.ifeval.task import KINDS, NEED_LANGUAGE, FollowedVerdict, IFEval, make_check

Row = dict[str, Any]
RELATIONS = ("less than", "at least")
WORDS = [
    "the",
    "River",
    "rain",
    "Wind",
    "steel",
    "IT'S",
    "USA",
    "don't",
    "a",
    "of",
    "U.S.",
    "e.g.",
    "Dr.",
    "caf\u00e9",
    "stra\u00dfe",
    "2.5",
    "foo_bar",
    "QUICK",
    "yes",
    "na\u00efve",
    "\u03a3",
]
PIECES = [
    "* point one",
    "- point two",
    "** bold **",
    "*high light*",
    "**very bold**",
    "* ",
    "*",
    "-",
    "  * x",
    "Section 1",
    "SECTION 2",
    "section 3",
    "Section",
    "Section12",
    "[name]",
    "[",
    "]",
    "[]",
    "[a [b] c]",
    "<<a title>>",
    "<<>>",
    "<<<>>>",
    "<< >>",
    "<<a",
    "b>>",
    "P.S. more",
    "P. S. more",
    "p.p.s",
    "P.P.S x",
    "P.P. S.",
    "***",
    " *** ",
    "******",
    "*******",
    "\n\n",
    "\n\n\n",
    "\n",
    "\t",
    '"',
    "'",
    ",",
    ".",
    "!",
    "?",
    "...",
    "My answer is yes.",
    "My answer is no.",
    "my answer is maybe.",
    '{"a": 1}',
    "```json",
    "```",
    "[1, 2]",
    "null",
    "That is all.",
    "That is all",
    "THE END",
    "Write of rain.",
    "write of RAIN.",
    "beyond",
    "'beyond,",
    '"Beyond"',
    "Any other questions?",
    "\u00a0",
    "\u2028",
    "\r\n",
    "\x0b",
    "$",
]
TEXTS = [
    "The rain falls on the quiet town and nobody walks in the streets this evening.",
    "La pluie tombe sur la ville tranquille et personne ne marche dans les rues ce soir.",
    "Der Regen f\u00e4llt auf die stille Stadt und niemand geht heute Abend durch die Gassen.",
    "\u041d\u043e\u0447\u044c\u044e \u0432 "
    "\u0433\u043e\u0440\u043e\u0434\u0435 \u0438\u0434\u0451\u0442 "
    "\u0442\u0438\u0445\u0438\u0439 \u0434\u043e\u0436\u0434\u044c.",
    "12345 67890",
    "See https://example.com or mail a.b@example.org now for the whole story of the rain.",
]


def arguments(kind: str, rng: random.Random) -> Row:
    """What a kind of instruction may ask for."""
    small, word = rng.randint(1, 5), rng.choice(["rain", "Wind", "steel", "USA", "the"])
    relation = rng.choice(RELATIONS)
    found: dict[str, Row] = {
        "keywords:existence": {"keywords": rng.sample(["rain", "wind", "a", "U.S.", "steel"], 2)},
        "keywords:frequency": {"keyword": word, "frequency": small, "relation": relation},
        "keywords:forbidden_words": {"forbidden_words": rng.sample(["rain", "IT", "x"], 2)},
        "keywords:letter_frequency": {
            "letter": rng.choice("aeQx"),
            "let_frequency": rng.randint(1, 9),
            "let_relation": relation,
        },
        "language:response_language": {"language": rng.choice(["en", "fr", "de", "ru"])},
        "length_constraints:number_sentences": {"num_sentences": small, "relation": relation},
        "length_constraints:number_paragraphs": {"num_paragraphs": rng.randint(1, 3)},
        "length_constraints:number_words": {
            "num_words": rng.randint(1, 40),
            "relation": relation,
        },
        "length_constraints:nth_paragraph_first_word": {
            "num_paragraphs": (num := rng.randint(1, 3)),
            "nth_paragraph": rng.randint(1, num),
            "first_word": rng.choice(["beyond", "the", "River", "\u03c3"]),
        },
        "detectable_content:number_placeholders": {"num_placeholders": small},
        "detectable_content:postscript": {
            "postscript_marker": rng.choice(["P.S.", "P.P.S", "P.P.S.", " P.S. "]),
        },
        "detectable_format:number_bullet_lists": {"num_bullets": rng.randint(1, 3)},
        "detectable_format:number_highlighted_sections": {"num_highlights": small},
        "detectable_format:multiple_sections": {
            "section_spliter": rng.choice(["Section", "SECTION", "PART "]),
            "num_sections": small,
        },
        "combination:repeat_prompt": {"prompt_to_repeat": "Write of rain."},
        "startend:end_checker": {"end_phrase": rng.choice(["That is all.", " THE end"])},
        "change_case:capital_word_frequency": {
            "capital_frequency": small,
            "capital_relation": relation,
        },
    }
    return found.get(kind, {})


def answer(rng: random.Random, kinds: list[str]) -> str:
    """A text that may follow instructions of these kinds, and may not."""
    shape = rng.randrange(12)
    if shape == 0:
        return rng.choice(["", " ", "\n\n", "\u00a0"])
    if shape == 1:
        text = " ".join(rng.sample(TEXTS, rng.randint(1, 2)))
        return rng.choice([text, text.upper(), text.lower(), f'"{text}"'])
    if "change_case:english_capital" in kinds and rng.random() < 0.5:
        return TEXTS[0].upper()
    if "detectable_format:number_bullet_lists" in kinds and rng.random() < 0.5:
        return "\n".join(f"{rng.choice('*-')} {word}" for word in rng.sample(WORDS, 2))
    gaps = (" ", " ", " ", "\n", "", "\n\n", ". ")
    parts = []
    for _ in range(rng.randint(1, 40)):
        parts.append(rng.choice(WORDS) if rng.random() < 0.6 else rng.choice(PIECES))
        parts.append(rng.choice(gaps))
    text = "".join(parts)
    if "combination:two_responses" in kinds and rng.random() < 0.5:
        text = f"{text.replace('***', '')}******{rng.choice([text, 'other', ' '])}"
    if "combination:repeat_prompt" in kinds and rng.random() < 0.5:
        text = f" Write of RAIN. {text}"
    if "startend:end_checker" in kinds and rng.random() < 0.5:
        text += rng.choice(['That is all."', "the end ", "THE END\n"])
    if "detectable_format:multiple_sections" in kinds and rng.random() < 0.5:
        text += " ".join(f"Section {number}" for number in range(rng.randint(1, 5)))
    if "startend:quotation" in kinds and rng.random() < 0.5:
        text = f'"{text}"'
    if "detectable_format:json_format" in kinds and rng.random() < 0.6:
        inside = json.dumps({"a": rng.choice(PIECES)})
        text = rng.choice([inside, f"```json\n{inside}\n```", f"```JSON{inside}```", f"{inside},"])
    if "length_constraints:nth_paragraph_first_word" in kinds and rng.random() < 0.6:
        starts = ["beyond", "'Beyond, so", '"the', "River.", "\n", "\u03a3\u03a3", "\u03a3"]
        text = "\n\n".join(f"{rng.choice(starts)} it is" for _ in range(rng.randint(1, 4)))
    if rng.random() < 0.2:
        text = f"Sure, here it is:\n{text}\nI hope that helps."
    return text


def rows_of(num: int) -> Iterator[tuple[Row, str]]:
    """Rows of the data with one to three instructions, and an answer for each."""
    rng = random.Random(num)
    kinds = sorted(KINDS)
    for number in range(num):
        chosen = [kinds[number % len(kinds)], *rng.sample(kinds, rng.choice((0, 0, 1, 2)))]
        given = [arguments(kind, rng) for kind in chosen]
        row = {
            "key": number,
            "prompt": "Write of rain.",
            "instruction_id_list": chosen,
            "kwargs": given,
        }
        yield row, answer(rng, chosen)


@pytest.fixture(scope="module")
def official(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """lm-eval's copy of the published code, with Punkt's data trained on a few sentences.

    Both sides read the same data, so it does not matter which. lm-eval would download them.
    """
    for name in ("lm_eval", "langdetect", "immutabledict", "nltk"):
        pytest.importorskip(name)
    import langdetect
    import nltk
    from nltk.tokenize.punkt import PunktTrainer, save_punkt_params

    home = tmp_path_factory.mktemp("nltk_data")
    data = home / "tokenizers" / "punkt_tab" / "english"
    data.parent.mkdir(parents=True)
    nltk.data.path.insert(0, str(home))
    trainer = PunktTrainer()
    trainer.train("Dr. Lee met Mr. Jones, e.g. at 5 p.m. there. Mr. Lee saw the U.S. coast. " * 40)
    save_punkt_params(trainer.get_params(), str(data))
    langdetect.DetectorFactory.seed = 0
    from lm_eval.tasks.ifeval import utils

    yield utils
    langdetect.DetectorFactory.seed = None
    nltk.data.path.remove(str(home))


def compare(num: int, official: ModuleType, folder: Path) -> None:
    pairs = list(rows_of(num))
    task = IFEval()
    data = task.load(TaskOptions(data=write_data(folder / "a.jsonl", [row for row, _ in pairs])))
    assert len(data.problems) == num
    seen: Counter[tuple[str, bool]] = Counter()
    for problem, (row, text) in zip(data.problems, pairs, strict=True):
        expected = official.process_results(row, [text])
        verdicts = task.score(problem, text)
        for name in ("strict", "loose"):
            verdict = verdicts[name]
            assert isinstance(verdict, FollowedVerdict)
            case = (row["instruction_id_list"], row["kwargs"], text, name)
            assert list(verdict.followed) == expected[f"inst_level_{name}_acc"], case
            assert verdict.correct == expected[f"prompt_level_{name}_acc"], case
            seen.update(zip(row["instruction_id_list"], verdict.followed, strict=True))
    # Every kind is followed by some answers, and is not by others.
    assert {kind for kind, followed in seen if followed} == KINDS
    assert {kind for kind, followed in seen if not followed} == KINDS


def test_all_kinds_are_scored_as_by_the_published_code(
    official: ModuleType, tmp_path: Path
) -> None:
    compare(400, official, tmp_path)


@pytest.mark.soak
def test_ten_thousand_answers_are_scored_as_by_the_published_code(
    official: ModuleType, tmp_path: Path
) -> None:
    compare(10_000, official, tmp_path)


def test_there_are_25_kinds() -> None:
    assert len(KINDS) == 25


HOSTILE = {
    "[": 900_000,
    "<": 900_000,
    "<<a": 300_000,
    "*": 900_000,
    " ": 900_000,
    "\n": 900_000,
    "\n *": 300_000,
    "{": 900_000,
    '{"a":': 200_000,
    "p.": 400_000,
    "Section1": 100_000,
    "- \n": 300_000,
    "A": 900_000,
    "a.": 450_000,
    "\u00e9": 900_000,
    "***": 300_000,
    "******": 150_000,
    '"': 900_000,
    "'": 900_000,
    "a@": 400_000,
    "http://": 100_000,
    "9": 900_000,
}


@pytest.mark.parametrize("kind", sorted(KINDS - NEED_LANGUAGE))
def test_long_hostile_answers_are_read_once(kind: str) -> None:
    """In time linear in the answer: a quadratic check of one of these would take minutes."""
    check = make_check(kind, arguments(kind, random.Random(0)), checks.RULE)
    for piece, times in HOSTILE.items():
        assert check(f"x{piece * (times // 4)}") in (True, False)


ENDLESS = "(a+)+b"
OF_DATA: dict[str, Row] = {
    "keywords:existence": {"keywords": [ENDLESS]},
    "keywords:frequency": {"keyword": ENDLESS, "relation": "less than", "frequency": 9},
    "keywords:forbidden_words": {"forbidden_words": [ENDLESS]},
    "detectable_content:postscript": {"postscript_marker": ENDLESS},
    "detectable_format:multiple_sections": {"section_spliter": ENDLESS, "num_sections": 1},
}


@pytest.mark.parametrize("kind", OF_DATA)
def test_patterns_of_data_that_take_for_ever_are_not_followed(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(patterns._COUNTS._setup, "seconds", 0.2)
    check = make_check(kind, OF_DATA[kind], checks.RULE)
    assert check("a" * 5000 + "c") is False
    # The same process counts on.
    assert check("aab 1") is (kind != "keywords:forbidden_words")


def test_answers_that_are_no_answers_are_invalid() -> None:
    task = IFEval()
    data = task.load(TaskOptions())
    for problem in data.problems:
        for text in ("[" * 10**7, "x" * 10**7, "", " \n"):
            verdicts = task.score(problem, text)
            assert all(v.answer is None and not v.correct for v in verdicts.values())


def test_missing_packages_are_named_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {
        "key": 1,
        "prompt": "p",
        "instruction_id_list": ["language:response_language"],
        "kwargs": [{"language": "fr", "num_words": None}],
    }
    other = {
        "key": 2,
        "prompt": "p",
        "instruction_id_list": ["length_constraints:number_sentences"],
        "kwargs": [{"num_sentences": 2, "relation": "at least"}],
    }
    first, second = (
        write_data(tmp_path / "1.jsonl", [row]),
        write_data(tmp_path / "2.jsonl", [other]),
    )
    monkeypatch.setattr(checks, "is_langdetect_installed", lambda: False)
    with pytest.raises(
        InputError, match=r"langdetect to check language:response_language; install it with: pip"
    ):
        IFEval().load(TaskOptions(data=first))
    monkeypatch.setattr(checks, "missing_for_punkt", lambda: checks.NEEDED)
    with pytest.raises(InputError, match=r"punkt_tab to check length_constraints.*downloader"):
        IFEval().load(TaskOptions(data=second))
    task = IFEval()
    data = task.load(TaskOptions(data=second, extra={"sentences": "rule"}))
    assert data.label == "sentences by rule"
    verdicts = [task.score(data.problems[0], text)["strict"].correct for text in ("A. B!", "A b.")]
    assert verdicts == [True, False]
    assert IFEval().load(TaskOptions()).problems  # the bundled ones need neither


def test_rows_that_cannot_be_checked_are_skipped_by_name(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"key": at, "prompt": "p", "instruction_id_list": [kind], "kwargs": [given]}
        for at, (kind, given) in enumerate(
            [
                ("punctuation:no_comma", {}),
                ("punctuation:none", {}),
                ("length_constraints:number_words", {"num_words": 3, "relation": "more"}),
                ("length_constraints:number_words", {"relation": "at least"}),
                ("keywords:existence", {"keywords": ["("]}),
            ]
        )
    ]
    rows.append({"key": 9, "prompt": "p", "instruction_id_list": ["a"], "kwargs": []})
    data = IFEval().load(TaskOptions(data=write_data(tmp_path / "a.jsonl", rows)))
    assert len(data.problems) == 1
    reasons = " / ".join(row.reason for row in data.skipped)
    for message in (
        "no instruction 'punctuation:none'",
        "relation must be 'less than' or 'at least', got 'more'",
        "num_words must be a non-negative integer, got None",
        "is not a valid pattern",
        "one object for each",
    ):
        assert message in reasons
    with pytest.raises(DataError, match="no usable prompt"):
        IFEval().load(TaskOptions(data=write_data(tmp_path / "b.jsonl", rows[1:])))


def test_accuracies_over_prompts_and_over_instructions() -> None:
    """By hand: 3 prompts with 1, 2 and 3 instructions, two answers to the first."""
    flags: dict[str, list[tuple[bool, ...]]] = {
        "a": [(True,), (False,)],
        "b": [(True, False)],
        "c": [(True, True, True)],
    }
    problems = [
        Problem(id, id, "", {"instructions": ["x:1", "y:2", "x:1"][: len(found[0])]})
        for id, found in flags.items()
    ]
    scores = [
        SampleScore(
            id,
            at,
            "stop",
            {
                name: FollowedVerdict("x", all(found), followed=found)
                for name in ("strict", "loose")
            },
        )
        for id, each in flags.items()
        for at, found in enumerate(each)
    ]
    options = ReportOptions(problem_ids=list(flags), num_samples=2, problems=problems)
    report = IFEval().aggregate(scores, options)
    assert report.value("prompt_level_acc", "strict") == pytest.approx((0.5 + 0 + 1) / 3)
    assert report.value("inst_level_acc", "loose") == pytest.approx((0.5 + 1 + 3) / 6)
    assert report.majority == ()
    (table,) = report.tables
    assert [row[:3] for row in table.rows] == [
        ("x:1", 4, pytest.approx((0.5 + 1 + 1 + 1) / 4)),
        ("y:2", 2, 0.5),
    ]
    row = next(row for row in report.metrics if row.metric == "inst_level_acc")
    # The error of a ratio over problems, by the usual formula.
    residuals = [0.5 - 0.75 * 1, 1 - 0.75 * 2, 3 - 0.75 * 3]
    spread = sum(each**2 for each in residuals) / 2
    assert row.stderr == pytest.approx((spread / 3) ** 0.5 / 2)


def test_language_detection_is_deterministic() -> None:
    pytest.importorskip("langdetect")
    texts = [*TEXTS, "ok", "a b", "x" * 900_000, "a@" * 400_000]
    assert [checks.language_of(text) for text in texts] == [
        checks.language_of(text) for text in texts
    ]
    assert checks.language_of("12345") is None
