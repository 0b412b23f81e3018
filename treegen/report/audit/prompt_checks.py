"""Finds defects of the prompts: special tokens, chat templates, examples, separators, cuts."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from treegen.common.bounded.templates import render_source
from treegen.common.files import read_text
from treegen.errors import ModelError, TreegenError
from treegen.prompts.tree import prompts_of
from treegen.report.audit import Severity
from treegen.report.audit.answers import references_of
from treegen.report.audit.findings import Finding, find
from treegen.report.audit.readers import squad_form
from treegen.report.run_document import content_text
from treegen.report.view import ProblemView, RunView, settings_group
from treegen.runs import RunInfo

_BOS: Final = re.compile(
    r"\A\s*(?:<s>|<bos>|<\|begin_of_text\|>|<\|startoftext\|>|<\uff5cbegin\u2581of\u2581sentence\uff5c>|\[BOS\])"
)
_TEMPLATE: Final = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|<\uff5cUser\uff5c>|<\|user\|>"
)
# Parts of the last component of a model's path or name.
_CHAT_NAME: Final = re.compile(
    r"(?:^|[-_.])(?:instruct|chat|it|assistant|sft|dpo)\d*(?=$|[-_.])", re.I
)
_BASE_NAME: Final = re.compile(r"(?:^|[-_.])(?:base|pt|pretrain(?:ed)?)(?=$|[-_.])", re.I)
_NEEDS_BOS: Final = "gemma"
# Other models of these types, such as Yi, were trained without the token.
_MAY_NEED_BOS: Final = ("llama", "mistral")
_MIN_QUESTION_CHARS: Final = 30  # characters from which a repeated question is no chance
_EXCERPT_CHARS: Final = 200  # characters of a prompt's end
_MARKER: Final = "zqx system text zqx"


OF_TOKENIZERS: Final = (
    "begin-token-twice",
    "begin-token-in-text",
    "begin-token-missing",
    "template-not-applied",
    "system-text-dropped",
)
"""Kinds of findings that depend on the tokenizer's files."""


def audit_prompts(
    view: RunView, kind: str, texts: Mapping[str, str], model: Path | None
) -> Iterator[Finding]:
    """Yield the findings on the prompts of a run.

    Args:
        view: The run.
        kind: The kind of its answers.
        texts: Its prompts, from `prompt_texts`.
        model: The directory of its model; None if it is not known.
    """
    if view.searched:
        return
    settings = settings_group(view.info, "prompt")
    # Inspect sends chat messages, which its provider formats.
    of_inspect = str(view.info.identity.get("imported", "")).startswith("inspect_ai")
    is_chat = of_inspect or bool(settings.get("apply_chat_template"))
    config = {} if model is None else _read_tokenizer_config(model)
    yield from _check_texts(view, texts, is_chat, config)
    yield from _check_examples(view, texts, kind)
    if not is_chat:
        yield from _check_separator(view, texts)
    yield from _check_template_and_bos(view, texts, is_chat, config)
    yield from _find_shortened(view)


def prompt_texts(view: RunView) -> dict[str, str]:
    """Return the prompts of a run by problem; problems whose prompt is unknown are left out."""
    return dict(_iter_prompts(view))


def _iter_prompts(view: RunView) -> Iterator[tuple[str, str]]:
    if view.job is not None and "imported" in view.info.identity:
        for problem in view.job.data.problems:
            if prompt := problem.metadata.get("prompt"):
                yield problem.id, prompt
    elif view.searched:
        for tree in view.trees:
            if tree.nodes and (text := tree.nodes[0].get("text")):
                yield tree.problem_id, text
    elif view.tree is not None:
        with suppress(TreegenError):
            for prompt in prompts_of(view.tree):
                yield prompt.id, "".join(content_text(node) for node in prompt.path)


def _check_texts(
    view: RunView, texts: Mapping[str, str], is_chat: bool, config: Mapping[str, Any]
) -> Iterator[Finding]:
    with_bos = [(name, text) for name, text in texts.items() if _BOS.match(text)]
    twice = [(name, text) for name, text in with_bos if _BOS.match(_BOS.sub("", text, count=1))]
    imported = "imported" in view.info.identity
    if not imported:  # the tokenizer adds the token, unless its settings say that it does not
        token = config.get("bos_token")
        if isinstance(token, str) and token and config.get("add_bos_token") is not False:
            twice = [(name, text) for name, text in with_bos if text.lstrip().startswith(token)]
    yield from _find("begin-token-twice", twice, texts)
    if not twice:
        yield from _find("begin-token-in-text", with_bos, texts)
    formatted = [(name, text) for name, text in texts.items() if _TEMPLATE.search(text)]
    if is_chat:
        yield from _find("template-applied-twice", formatted, texts)
    elif view.job is not None and not view.job.choices and not formatted:
        spaced = [(name, text) for name, text in texts.items() if text.endswith((" ", "\t"))]
        # Many published prompts, such as those of treegen's and lm-eval's tasks, end like this.
        severity: Severity | None = None if imported else "low"
        yield from _find("trailing-space", spaced, texts, severity=severity)


def _check_examples(view: RunView, texts: Mapping[str, str], kind: str) -> Iterator[Finding]:
    if view.job is None or not view.job.data.num_fewshot:
        return
    repeated = [
        (problem.id, texts[problem.id])
        for problem in view.problems
        if problem.id in texts
        and len(problem.question) >= _MIN_QUESTION_CHARS
        and _is_among_examples(problem, texts[problem.id])
    ]
    yield from _find("problem-among-examples", repeated, texts)
    # A letter, a number or a label such as "positive" is the answer of other problems by chance.
    is_label = len({p.answer for p in view.problems}) < len(view.problems) / 2
    if kind not in ("text", "mathematics") or is_label:
        return
    solved = {squad_form(answer) for _, answer in view.job.data.turns}
    solved = {form for form in solved if len(form) > 5}
    answered = [
        (p.id, f"{p.reference}: {p.question}")
        for p in view.problems
        if any(squad_form(gold) in solved for gold in references_of(p.answer))
    ]
    yield from find("reference-among-examples", answered, len(view.problems), unit="problems")


def _is_among_examples(problem: ProblemView, prompt: str) -> bool:
    """Return whether a prompt shows its problem with the reference before it asks the problem.

    The choices and the text that asks for the answer must be the same too: examples may have an
    equal stem, and a prompt may say the question twice.
    """
    question, prompt = " ".join(problem.question.split()), " ".join(prompt.split())
    at = prompt.rfind(question)
    if at < 0:
        return False
    first = prompt.find(prompt[at:])
    between = prompt[first + len(prompt) - at : at]
    golds = references_of(problem.answer)
    return first < at and any(" ".join(gold.split()) in between for gold in golds)


def _check_separator(view: RunView, texts: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding if the model can begin another example without being stopped."""
    if view.job is None or not view.job.data.num_fewshot or view.job.choices:
        return
    stop_setting = settings_group(view.info, "sampling").get("stop")
    stops = [stop for stop in stop_setting if stop] if isinstance(stop_setting, list) else []
    problem_id, text = next(iter(texts.items()), ("", ""))  # all prompts have the same form
    question = next((p.question for p in view.problems if p.id == problem_id), "")
    before, found, _ = text.rpartition(question or "\0")
    line = before.rpartition("\n")[2] if found else ""
    header = line.strip()
    if not header.endswith(":") or len(line) > 40:
        return
    if any(str(stop) in f"\n\n{line}" for stop in stops):
        return
    ran_on = [s for s in view.samples if f"\n{header}" in s.text]
    yield from find(
        "separator-does-not-stop",
        ran_on or [(problem_id, text[-_EXCERPT_CHARS:])],
        view.num_done,
        severity=None if ran_on else "low",
        header=header,
    )


def _check_template_and_bos(
    view: RunView, texts: Mapping[str, str], is_chat: bool, config: Mapping[str, Any]
) -> Iterator[Finding]:
    """Yield findings that follow from the model's name and its tokenizer's files."""
    identity, model = view.info.identity, str(view.info.free.get("model") or "")
    is_drawn = view.job is not None and not view.job.choices
    template = config.get("chat_template")
    name = model.rstrip("/").rpartition("/")[2]
    has_chat_name, has_base_name = bool(_CHAT_NAME.search(name)), bool(_BASE_NAME.search(name))
    is_formatted = any(_TEMPLATE.search(text) for text in texts.values())
    prompt = [("", next(iter(texts.values()), "")[-_EXCERPT_CHARS:])]
    is_known = bool(texts) or "imported" not in identity
    is_named_chat = has_chat_name and not has_base_name
    is_plain = is_drawn and is_known and not is_chat and not is_formatted
    if is_plain and (is_named_chat or template):
        has_examples = view.job is not None and view.job.data.num_fewshot > 0
        yield from find(
            "template-not-applied",
            prompt,
            1,
            unit="runs",
            severity="medium" if is_named_chat and not has_examples else "low",
            model=model,
        )
    settings = settings_group(view.info, "prompt")
    system = settings.get("system_instruction")
    applied = settings.get("apply_chat_template")  # of Inspect's providers it is not known
    if applied and has_base_name and not has_chat_name:
        yield from find("template-on-base-model", prompt, 1, unit="runs", model=model)
    if is_chat and system and isinstance(template, str):
        messages = [
            {"role": "system", "content": _MARKER},
            {"role": "user", "content": "question"},
        ]
        special = {k: str(v) for k, v in config.items() if k.endswith("_token")}
        # A template that rejects system texts would have ended the run at its start.
        with suppress(TreegenError):
            rendered = render_source(template, messages, special, add_generation_prompt=True)
            if _MARKER not in rendered:
                yield from find("system-text-dropped", [("", str(system))], 1, unit="runs")
    model_type = str(config.get("model_type"))
    needs, may_need = _NEEDS_BOS in model_type, any(kind in model_type for kind in _MAY_NEED_BOS)
    lacks = config.get("add_bos_token") is False and bool(config.get("bos_token")) and not is_chat
    if (needs or may_need) and lacks and not any(_BOS.match(text) for text in texts.values()):
        yield from find(
            "begin-token-missing",
            prompt,
            1,
            unit="runs",
            severity="medium" if needs else "low",
        )


def find_tokenizer(info: RunInfo) -> Path | None:
    """Return the directory of a run's model, without downloading it; None if the run names none.

    Args:
        info: The settings of the run.

    Raises:
        ModelError: the model is neither a directory nor in the local Hugging Face cache, or it is a
            GGUF file, which has no tokenizer files.
        InputError: the run has no text for the name of its model.
    """
    from treegen.model.checkpoint.files import locate

    free = info.resumes[-1]["free"] if info.resumes else info.free
    model, revision = free.get("model"), free.get("revision")
    if not model:
        return None
    revision = revision if isinstance(revision, str) else None
    directory = locate(model, revision, weights=False, download=False)
    if not os.path.isdir(directory):
        raise ModelError(f"{directory} is a GGUF file, which has no tokenizer files")
    return directory


def _read_tokenizer_config(model: Path) -> dict[str, Any]:
    """Return the settings of a tokenizer, with the model's type; empty if there is none."""
    from treegen.model.checkpoint.files import read_object

    config: dict[str, Any] = {}
    for name in ("config.json", "tokenizer_config.json"):
        with suppress(TreegenError):
            config |= read_object(model / name)
    with suppress(OSError, ValueError, TreegenError):
        config["chat_template"] = read_text(model / "chat_template.jinja")
    bos = config.get("bos_token")
    return config | ({"bos_token": bos.get("content")} if isinstance(bos, dict) else {})


def _find_shortened(view: RunView) -> Iterator[Finding]:
    with suppress(TreegenError), view.open() as run:
        count = run.stored_results().get("shortened")
        if isinstance(count, int):
            num_shortened = min(max(0, count), view.num_done)
            yield from find("prompt-shortened", [("", "")] * num_shortened, view.num_done)


def _find(
    name: str,
    cases: Sequence[tuple[str, str]],
    texts: Mapping[str, str],
    severity: Severity | None = None,
) -> Iterator[Finding]:
    """Yield a finding on prompts; the arguments are as those of `find`."""
    yield from find(name, cases, len(texts), unit="problems", severity=severity)
