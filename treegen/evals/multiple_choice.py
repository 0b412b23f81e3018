"""Token ids of prompts that are each followed by one of several choices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.errors import CapacityError, InputError, arg
from treegen.evals.problem import Problem
from treegen.evals.task import Task, TaskData
from treegen.evals.truncation import chain_below
from treegen.prompts.plan.plan import Request
from treegen.prompts.tree import Node, Prompt, prompts_of

if TYPE_CHECKING:
    from treegen.common.spec import ModelSpec
    from treegen.prompts.images.table import ImageTable
    from treegen.prompts.radix import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class ChoicePrompt:
    """A problem's prompt and its choices."""

    id: str
    """The problem's id."""
    context: "Tokens"
    """The tokens of the prompt; with openings, the tokens that all choices share before them."""
    sequences: tuple["Tokens", ...]
    """For each choice, the tokens of the prompt, its opening and the choice."""
    starts: tuple[int, ...]
    """For each choice, the number of tokens of its sequence before the choice."""

    @property
    def longest(self) -> int:
        """The number of tokens of the prompt with its longest choice."""
        return max(map(len, self.sequences))

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and its choices; shared tokens count once."""
        return num_distinct(self.sequences)

    def pairs(self) -> list[tuple[list[int], list[int]]]:
        """Return context and continuation of each choice, as `LLM.score` takes them."""
        return [
            (tokens[:start].tolist(), tokens[start:].tolist())
            for tokens, start in zip(self.sequences, self.starts, strict=True)
        ]


def is_multiple_choice(data: TaskData) -> bool:
    """Return whether choices are scored and nothing is drawn.

    Raises:
        InputError: only some problems have choices, or a problem's choices or openings are invalid.
    """
    if data.scored:
        return True
    with_choices = [problem for problem in data.problems if problem.choices]
    if not with_choices:
        return False
    for problem in data.problems:
        if problem.openings and len(problem.openings) != len(problem.choices):
            raise InputError(
                f"problem {problem.id!r} has {len(problem.openings)} openings for "
                f"{len(problem.choices)} choices; set one opening per choice, or remove the "
                "openings"
            )
        if len(problem.choices) < 2 or len(set(problem.candidates)) < len(problem.choices):
            raise InputError(
                f"problem {problem.id!r} has the choices {list(problem.candidates)}; each "
                "problem needs two or more different choices"
            )
    return True


def pick_length_normalized(problem: Problem, logprobs: Sequence[float]) -> str:
    """Return the candidate with the highest log-probability per character of its choice.

    Of equal ones it is the first. lm-eval's acc_norm uses the same rule. As there, the one space
    that separates a choice from the prompt does not count as a character, and all others do.
    Without the division a long choice loses because of its length.
    """
    per_character = [
        logprob / max(len(choice.removeprefix(" ")), 1)
        for choice, logprob in zip(problem.choices, logprobs, strict=True)
    ]
    return problem.candidates[max(range(len(logprobs)), key=per_character.__getitem__)]


def check_settings(
    task: Task, num_samples: int, sampling: SamplingParams, default: SamplingParams
) -> None:
    """Raise InputError for sampling settings of a user, because nothing is drawn.

    Args:
        task: The task, for the message.
        num_samples: The number of samples per problem; must be 1.
        sampling: The sampling parameters of the run.
        default: The task's own sampling parameters.
    """
    why = f"task {task.name!r} picks the most likely choice and draws no samples"
    if num_samples != 1:
        raise InputError(
            f"{why}, so {arg('num_samples', num_samples)} is not supported; remove "
            f"{arg('num_samples=')}"
        )
    for name in SamplingParams.__dataclass_fields__:
        # The seed may also select few-shot examples.
        if name != "seed" and getattr(sampling, name) != getattr(default, name):
            raise InputError(f"{why}; remove {arg(name + '=')}")


def choice_prompts(
    tree: Node, problems: Mapping[str, Problem], tokenizer: Any, images: "ImageTable | None" = None
) -> list[ChoicePrompt]:
    """Return the tokens of a tree's prompts with their choices, in the tree's order.

    A choice is tokenized together with the text before it. After chat messages it begins the
    assistant's turn, so it is tokenized on its own, without the spaces that it starts with.

    Args:
        tree: The prompt tree.
        problems: The problems by id, with their choices and openings.
        tokenizer: The model's tokenizer.
        images: The model's images; None if it takes none.
    """
    from treegen.prompts.tokens import tokenize

    prompts = prompts_of(tree)
    leaves = [
        leaf
        for number, prompt in enumerate(prompts)
        for leaf in _leaves(prompt, str(number), problems[prompt.id])
    ]
    leaf_tree = Node("", children=leaves, samples=0)
    tokens = {p.id: p.tokens for p in tokenize(leaf_tree, tokenizer, images)}
    choice_tokens: dict[str, Tokens] = {}
    prompts_with_choices = []
    for number, prompt in enumerate(prompts):
        problem = problems[prompt.id]
        before = [tokens[f"{number}:{at}"] for at in range(len(problem.openings) or 1)]
        contexts = before if problem.openings else before * len(problem.choices)
        sequences = []
        for index, choice in enumerate(problem.choices):
            joint = tokens.get(f"{number}/{index}")
            if joint is None:
                if choice not in choice_tokens:
                    ids = tokenizer(choice.lstrip(), add_special_tokens=False)["input_ids"]
                    choice_tokens[choice] = np.array(ids, dtype=np.int32)
                joint = np.concatenate([contexts[index], choice_tokens[choice]])
            sequences.append(joint)
        start = tuple(map(common_length, contexts, sequences))
        shared = before[0][: min(common_length(before[0], other) for other in before)]
        prompts_with_choices.append(ChoicePrompt(prompt.id, shared, tuple(sequences), start))
    return prompts_with_choices


def choice_requests(prompts: Sequence[ChoicePrompt], spec: "ModelSpec") -> list[Request]:
    """Return one request per choice.

    Raises:
        CapacityError: a prompt with a choice is too long for the model.
        InputError: a prompt or choice has no token of its own, or one outside the vocabulary.
    """
    from treegen.prompts.plan.requests import check_vocabulary

    requests = []
    for prompt in prompts:
        excess = prompt.longest - 1 - spec.context_length  # the last token is only scored
        if excess > 0:
            raise CapacityError(
                f"prompt {prompt.id!r} and its longest choice have {prompt.longest:,} tokens, "
                f"{excess:,} too many for the model's context of {spec.context_length:,}; shorten "
                "the prompt or use fewer examples"
            )
        for index, (tokens, start) in enumerate(zip(prompt.sequences, prompt.starts, strict=True)):
            name = f"{prompt.id}/{index}"
            check_vocabulary(name, tokens, spec)
            if not 0 < start < len(tokens):
                what = "prompt" if start == 0 else f"choice {index}"
                raise InputError(
                    f"problem {prompt.id!r}: the {what} adds no token; change the text of the "
                    f"{what}, or remove the problem"
                )
            requests.append(
                Request(name, tokens, samples=0, rows=0, max_tokens=1, score_from=start)
            )
    return requests


def common_length(first: "Tokens", second: "Tokens") -> int:
    """Return the number of leading tokens that two sequences share."""
    shared = min(len(first), len(second))
    different = first[:shared] != second[:shared]
    return int(different.argmax()) if different.any() else shared


def num_distinct(sequences: Sequence["Tokens"]) -> int:
    """Return the number of tokens of all sequences if shared leading tokens count once."""
    # Big-endian bytes sort like the tokens, so sequences that share most are neighbours.
    ordered = sorted(sequences, key=lambda tokens: tokens.astype(">i4").tobytes())
    shared = sum(common_length(a, b) for a, b in pairwise(ordered))
    return sum(map(len, ordered)) - shared


def _leaves(prompt: Prompt, name: str, problem: Problem) -> list[Node]:
    """Return a prompt with each of its openings, followed by the choices where they are text."""
    above = prompt.path[:-1]
    texts = [] if any(node.has_messages for node in prompt.path) else problem.choices
    if not problem.openings:
        children = [Node(text, id=f"{name}/{index}") for index, text in enumerate(texts)]
        leaf = replace(prompt.node, children=children, samples=1, id=f"{name}:0")
        return [chain_below(above, leaf)]
    chains = []
    for index, opening in enumerate(problem.openings):
        children = [Node(texts[index], id=f"{name}/{index}")] if texts else []
        last = Node(opening, children=children, samples=1, id=f"{name}:{index}")
        if prompt.node.has_messages:
            messages: list[Any] = list(prompt.node.content)
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{opening}"}
            leaf = replace(last, content=messages)
        else:
            leaf = replace(prompt.node, children=[last], samples=0, id=None)
        chains.append(chain_below(above, leaf))
    return chains


@dataclass(frozen=True, slots=True, eq=False)
class OwnRequests:
    """The requests of a task, in the order of its problems."""

    tree: Node
    """A sampled node of token ids for each problem, with the problem's id."""
    params: Sequence[SamplingParams] = ()
    """Sampling parameters for each problem; empty if nothing is drawn."""
    scored: tuple[ChoicePrompt, ...] = ()
    """The scored texts of each problem; empty if samples are drawn."""
    text: Callable[[Completion], str] = lambda completion: completion.text
    """Returns the text of a finished sample, as the task reads it."""
