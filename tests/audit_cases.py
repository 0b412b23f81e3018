"""Small imported runs for tests of the audit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treegen.report.exchange.external_log import ExternalLog, make_runs

NO_BEGIN = {
    "add_bos_token": False,
    "bos_token": "<s>",
    "chat_template": "{{ messages[-1].content }}",
}
"""Settings of a tokenizer that puts no token before a text."""


def import_run(
    folder: Path,
    problems: Sequence[tuple[str, str]],
    samples: Sequence[Sequence[tuple[str, str | None, bool]]],
    *,
    prompt: str = "",
    finish: str = "stop",
    num_tokens: int = 40,
    **log: Any,
) -> Path:
    """Write an imported run and return its directory.

    Args:
        folder: Where it is written.
        problems: Questions and references.
        samples: For each problem, texts with the answer that was read and its verdict.
        prompt: The prompt, in which {question} and {answer} stand for those of the problem.
        finish: Why the samples ended.
        num_tokens: The tokens of each sample.
        log: Further fields of the log.
    """
    content = {
        "problems": tuple(
            {
                "id": str(number),
                "question": question,
                "answer": answer,
                "prompt": prompt.replace("{question}", question).replace("{answer}", answer),
            }
            for number, (question, answer) in enumerate(problems)
        ),
        "samples": tuple(
            {
                "problem_id": str(number),
                "index": index,
                "text": text,
                "num_tokens": num_tokens,
                "finish_reason": finish,
                "verdicts": {"score": {"answer": answer, "correct": correct}},
            }
            for number, of_problem in enumerate(samples)
            for index, (text, answer, correct) in enumerate(of_problem)
        ),
    }
    head = {"task": "t", "version": "1", "model": "m", "source": "s", "filters": ("score",)}
    whole = {**head, **content, "num_samples": len(samples[0]), **log}
    return make_runs([ExternalLog.model_validate(whole)], folder / "run")[0]
