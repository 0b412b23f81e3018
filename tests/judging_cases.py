"""What the tests of judged runs share: a made-up run, and an LLM that the tests can watch."""

from pathlib import Path

from report_cases import make_run

RUBRIC = """
name: brief
choices: {good: 1, bad: 0}
wordings:
  - |
    Say whether an answer is good or bad.
    Question: {{ question }}
    Answer: {{ answer }}
  - |
    Good or bad?
    {{ question }}
    {{ answer }}
"""

# The first A, B or C that a judge happens to write decides, so a model that knows no verdicts gives
# some: what is tested is what becomes of them.
LETTERS = """
name: letters
reader: simpleqa
choices: {A: 1, B: 0, C: 0.5}
wordings:
  - "Judge: {{ question }} {{ answer }}"
  - "Once more: {{ question }} {{ answer }}"
"""


def small_run(path: Path, *, problems: int = 4, samples: int = 3, seed: int = 0) -> Path:
    """A run whose samples are short texts; its problems depend on their number alone."""
    return make_run(
        path,
        num_problems=problems,
        num_samples=samples,
        seed=seed,
        draw=lambda rng, number, index: f" It is {number + rng.choice([0, 0, 1])}, I say.",
    )


def rubric_file(folder: Path, text: str = RUBRIC) -> Path:
    """A rubric in a file."""
    path = folder / "rubric.yaml"
    path.write_text(text)
    return path
