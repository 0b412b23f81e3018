"""Universal self-consistency: the model itself picks the most consistent of its answers.

The method is Chen et al. 2023, "Universal Self-Consistency for Large Language Model Generation".
For each problem, a further prompt shows the question and the texts of the samples, without their
reasoning, and asks which sample is most consistent with the others, so that answers that cannot be
compared can vote too. The same model answers greedily, and each pick is stored in the run directory
as it arrives.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.common.checks import check_argument_types
from treegen.common.params import SamplingParams
from treegen.errors import CapacityError, InputError, arg
from treegen.evals.thinking import get_answer_text
from treegen.prompts.tree import Node
from treegen.runs import RecordFile, RunDir, open_for_append

if TYPE_CHECKING:
    from treegen.evals.job import Job
    from treegen.llm.base import BaseLLM

FILE: Final = "usc.jsonl"
# The wording of the paper.
_HEAD: Final = "I have generated the following responses to the question: {question}\n\n"
_RESPONSE: Final = "Response {number}: {text}\n\n"
_TAIL: Final = (
    "Evaluate these responses.\nSelect the most consistent response based on majority consensus.\n"
    'Start your answer with "The most consistent response is Response X" (without quotes).\n'
)
_PICKED: Final = re.compile(r"response\s+(?:is\s+)?(?:response\s+)?#?(\d+)", re.IGNORECASE)
_MAX_TOKENS: Final = 32


@dataclass(frozen=True, slots=True)
class PickPrompt:
    """A prompt that asks for the most consistent sample of a problem."""

    problem_id: str
    prompt: str
    samples: tuple[int, ...]
    """The indices of the samples, in the order in which the prompt shows them."""

    @property
    def key(self) -> str:
        """A hash of the prompt, so that a pick among other texts does not count for this one."""
        return hashlib.blake2b(self.prompt.encode(), digest_size=16).hexdigest()


@check_argument_types
def question_of(
    problem_id: str, question: str, texts: Mapping[int, str], most: int | None = None
) -> PickPrompt:
    """Return the prompt of one problem.

    Args:
        problem_id: Id of the problem.
        question: Question of the problem.
        texts: Texts of its samples, by index.
        most: Maximum number of samples to show, from the first; None shows all.
    """
    indices = sorted(texts)[:most]
    responses = [
        _RESPONSE.format(number=number, text=texts[index].strip())
        for number, index in enumerate(indices, 1)
    ]
    prompt = f"{_HEAD.format(question=question)}{''.join(responses)}{_TAIL}"
    return PickPrompt(problem_id, prompt, tuple(indices))


@check_argument_types
def parse_pick(text: str, samples: Sequence[int]) -> int:
    """Return the index of the sample that a text picks; the first sample if it picks none.

    Args:
        text: The model's answer.
        samples: Indices of the samples, in the order in which the prompt shows them.

    Raises:
        InputError: there are no samples.
    """
    if not samples:
        raise InputError(
            "the argument `samples` must not be empty; pass the index of at least one sample"
        )
    match = _PICKED.search(text)
    number = int(match[1]) if match and len(match[1]) < 10 else 1
    return samples[number - 1] if 1 <= number <= len(samples) else samples[0]


def pick_samples(
    job: "Job",
    run: RunDir,
    llm: "BaseLLM",
    *,
    most: int | None = None,
    stop: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, int]]:
    """Let the model pick a sample of every problem without a pick, and store the picks.

    Args:
        job: The job of the run.
        run: The run, open for reading.
        llm: The model.
        most: Maximum number of samples to show, from the first, if prompts would be too long; None
            shows all.
        stop: Called before every step; if it returns a true value, the iteration ends.

    Yields:
        (picks, problems) after every step.

    Raises:
        InputError: the first sample of a problem is missing.
        CapacityError: a prompt is too long for the model.
        RunError: the picks cannot be written.
    """
    questions = questions_of(job, run, most)
    with open_for_append(run.path / FILE, "usc.lock") as file:
        picked = {row["problem_id"]: row["key"] for row in file.records()}  # the last pick counts
        pending = [query for query in questions if picked.get(query.problem_id) != query.key]
        next_indices, done = file.next_indices(), len(questions) - len(pending)
        yield done, len(questions)
        if not pending:
            return
        question_of_problem = {query.problem_id: query for query in pending}
        nodes = []
        for query in pending:
            content: Any = query.prompt
            if job.settings.apply_chat_template:
                content = [{"role": "user", "content": query.prompt}]
            nodes.append(Node(content, id=query.problem_id, samples=1))
        params = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, seed=0)
        try:
            stream = llm.stream(Node("", children=nodes, samples=0), params)
        except CapacityError as error:
            raise CapacityError(
                f"{error.message.marked}; show fewer samples with {arg('most=')}"
            ) from error
        with stream:
            while stream.has_work and not stop():
                for completion in stream.step():
                    query = question_of_problem[completion.prompt_id]
                    pick = {
                        "problem_id": query.problem_id,
                        "sample_index": next_indices[query.problem_id],
                        "key": query.key,
                        "text": completion.text,
                        "picked": parse_pick(completion.text, query.samples),
                        "shown": len(query.samples),
                    }
                    file.append(pick)
                    done += 1
                yield done, len(questions)


def questions_of(job: "Job", run: RunDir, most: int | None = None) -> list[PickPrompt]:
    """Return the prompt of every problem of a run, as from `question_of`.

    A vote at k is over the first k samples. So if a run is not complete, a prompt shows only the
    samples before the first missing one.

    Args:
        job: The job of the run.
        run: The run, open for reading.
        most: Maximum number of samples to show, from the first; None shows all.

    Raises:
        InputError: the first sample of a problem is missing.
    """
    texts: dict[str, dict[int, str]] = {problem.id: {} for problem in job.data.problems}
    for record in run.records():
        texts[record["problem_id"]][record["sample_index"]] = get_answer_text(record)
    for problem_id, problem_texts in texts.items():
        if 0 not in problem_texts:
            raise InputError(
                f"problem {problem_id!r} has no sample to pick from, because its first sample is "
                "missing; finish the run first"
            )
        num = next(index for index in count() if index not in problem_texts)
        texts[problem_id] = {index: problem_texts[index] for index in range(num)}
    return [question_of(p.id, p.question, texts[p.id], most) for p in job.data.problems]


def read_picks(folder: Path) -> dict[str, tuple[int, int]]:
    """Return the picks of a run, by problem.

    A pick is the index of the picked sample, and the number of first samples that were shown.
    """
    path = folder / FILE
    if not os.path.exists(path):
        return {}
    with closing(RecordFile(path, writable=False)) as file:
        return {row["problem_id"]: (row["picked"], row["shown"]) for row in file.records()}
