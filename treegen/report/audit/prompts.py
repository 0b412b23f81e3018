"""Finds defects of the prompts: special tokens, chat templates, examples, separators, cuts."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from treegen.common.bounded.templates import render_source
from treegen.common.files.reading import read_text
from treegen.errors import TreegenError
from treegen.prompts.tree import prompts_of
from treegen.report.audit.answers import references_of
from treegen.report.audit.findings import Finding, severity_of
from treegen.report.audit.readers import squad_form
from treegen.report.prompt_tree import content_text
from treegen.report.view import RunView
from treegen.runs import RunDir

_BOS: Final = re.compile(
    r"\A\s*(?:<s>|<bos>|<\|begin_of_text\|>|<\|startoftext\|>|<\uff5cbegin\u2581of\u2581sentence\uff5c>|\[BOS\])"
)
_TEMPLATE: Final = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|\[INST\]|<\uff5cUser\uff5c>|<\|user\|>"
)
_CHAT_NAME: Final = re.compile(
    r"(?:^|[-_/.])(?:instruct|chat|it|assistant|sft|dpo)\d*(?=$|[-_/.])", re.I
)
_BASE_NAME: Final = re.compile(r"(?:^|[-_/.])(?:base|pt|pretrain(?:ed)?)(?=$|[-_/.])", re.I)
_NEEDS_BOS: Final = ("gemma", "llama", "mistral")
_LEAST_QUESTION: Final = 30  # characters from which a repeated question is no chance
_MARKER: Final = "zqx system text zqx"


def audit_prompts(view: RunView, kind: str) -> Iterator[Finding]:
    """Yield the findings on the prompts of a run.

    Args:
        view: The run.
        kind: The kind of its answers.
    """
    if view.searched:
        return
    texts = dict(_texts(view))
    settings: Any = view.info.identity.get("prompt") or {}
    is_chat = bool(settings.get("apply_chat_template"))
    yield from _of_texts(view, texts, is_chat)
    yield from _examples(view, texts, kind)
    if not is_chat:
        yield from _separator(view, texts)
    yield from _of_model(view, texts, is_chat, settings.get("system_instruction"))
    yield from _shortened(view)


def _texts(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield the id and the prompt of each problem whose prompt is known."""
    if view.job is not None and "imported" in view.info.identity:
        for problem in view.job.data.problems:
            if prompt := problem.metadata.get("prompt"):
                yield problem.id, prompt
    elif view.tree is not None:
        with suppress(TreegenError):
            for prompt in prompts_of(view.tree):
                yield prompt.id, "".join(content_text(node) for node in prompt.path)


def _of_texts(view: RunView, texts: Mapping[str, str], is_chat: bool) -> Iterator[Finding]:
    begun = {name: text for name, text in texts.items() if _BOS.match(text)}
    twice = {n: t for n, t in begun.items() if _BOS.match(_BOS.sub("", t, count=1))}
    if twice:
        yield _finding(
            texts,
            twice,
            "high",
            "begin-token-twice",
            "the prompt has the begin-of-text token twice",
            "let the tokenizer or the template add it, not both",
        )
    elif begun and "imported" not in view.info.identity:
        yield _finding(
            texts,
            begun,
            "high",
            "begin-token-twice",
            "the text of the prompt has the begin-of-text token, and the tokenizer adds another",
            "give the messages themselves (apply_chat_template), or the text without the token",
        )
    elif begun:
        yield _finding(
            texts,
            begun,
            "low",
            "begin-token-in-text",
            "the text of the prompt has the begin-of-text token",
            "check that the tool did not add another one (add_special_tokens=False)",
        )
    if is_chat and (formatted := {n: t for n, t in texts.items() if _TEMPLATE.search(t)}):
        yield _finding(
            texts,
            formatted,
            "high",
            "template-applied-twice",
            "the prompt has the markup of a chat template before the template is applied",
            "remove the markup from the data, or leave out apply_chat_template",
        )
    spaced = {n: t for n, t in texts.items() if t.endswith((" ", "\t"))}
    if spaced and not is_chat:
        yield _finding(
            texts,
            spaced,
            "medium",
            "trailing-space",
            "the prompt ends with a space, so the answer cannot begin with its usual token",
            "remove the space at the end of the template",
        )


def _examples(view: RunView, texts: Mapping[str, str], kind: str) -> Iterator[Finding]:
    num_fewshot = 0 if view.job is None else view.job.data.num_fewshot
    questions = {p.id: p.question for p in view.problems if len(p.question) >= _LEAST_QUESTION}
    repeated = {
        name: text
        for name, text in texts.items()
        if name in questions and text.count(questions[name]) > 1
    }
    if repeated and num_fewshot:
        yield _finding(
            texts,
            repeated,
            "high",
            "problem-among-examples",
            "the prompt has the problem twice: it is one of its own solved examples",
            "draw the examples from another split",
        )
    turns = () if view.job is None else view.job.data.turns
    solved = {squad_form(answer) for _, answer in turns} if kind in ("text", "mathematics") else ()
    known = {
        p.id: p.question
        for p in view.problems
        if any(len(form := squad_form(g)) > 5 and form in solved for g in references_of(p.answer))
    }
    if known:
        yield _finding(
            {p.id: "" for p in view.problems},
            known,
            severity_of(len(known), len(view.problems), high=0.5, medium=0.05),
            "reference-among-examples",
            "the reference is the answer of a solved example too, so copying it is right",
            "draw other examples",
        )


def _separator(view: RunView, texts: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a finding if the model can begin another example without being stopped."""
    if view.job is None or not view.job.data.num_fewshot or view.job.choices:
        return
    sampling: Any = view.info.identity.get("sampling") or {}
    stops = [stop for stop in sampling.get("stop") or () if stop]
    questions = {p.id: p.question for p in view.problems}
    for name, text in texts.items():
        at = text.rfind(questions.get(name) or "\0")
        line = text[:at].rpartition("\n")[2] if at > 0 else ""
        if not line.strip() or len(line) > 40 or any(stop in f"\n\n{line}" for stop in stops):
            return
        header = line.strip()
        ran = [s for s in view.samples if f"\n{header}" in s.text]
        yield Finding(
            kind="separator-does-not-stop",
            area="prompts",
            severity=severity_of(len(ran), max(1, view.num_done), high=0.1, medium=0.02),
            count=len(ran),
            total=view.num_done,
            unit="samples",
            message=f"an example begins with {header!r}, which no stop string matches; so many "
            "samples begin another one",
            advice=f"add {header!r} to the stop strings",
            example=ran[0].text if ran else text[-200:],
            problem_id=ran[0].problem_id if ran else name,
            sample_index=ran[0].index if ran else None,
        )
        return


def _of_model(
    view: RunView, texts: Mapping[str, str], is_chat: bool, system: str | None
) -> Iterator[Finding]:
    """Yield findings that follow from the model's name and its tokenizer's files.

    Args:
        view: The run.
        texts: The prompts by problem.
        is_chat: Whether the chat template is applied.
        system: The system text.
    """
    identity, model = view.info.identity, str(view.info.free.get("model") or "")
    is_drawn = view.job is not None and not view.job.choices
    config = _tokenizer_config(model)
    template = config.get("chat_template")
    is_named_chat = bool(_CHAT_NAME.search(model.rstrip("/"))) and not _BASE_NAME.search(model)
    is_formatted = any(_TEMPLATE.search(text) for text in texts.values())
    if is_drawn and not is_chat and not is_formatted and (is_named_chat or template):
        unknown = "imported" in identity and not texts
        num_fewshot = view.job.data.num_fewshot if view.job is not None else 0
        if not unknown:
            yield _of_run(
                view,
                "medium" if is_named_chat and not num_fewshot else "low",
                "template-not-applied",
                f"{model} is a chat model, and its prompts are plain text",
                "compare with a run with apply_chat_template",
                next(iter(texts.values()), ""),
            )
    if is_chat and _BASE_NAME.search(model.rstrip("/")):
        yield _of_run(
            view,
            "medium",
            "template-on-base-model",
            f"{model} seems to be a base model, and its prompts are chat messages",
            "compare with a run without apply_chat_template",
            next(iter(texts.values()), ""),
        )
    if is_chat and system and isinstance(template, str):
        messages = [
            {"role": "system", "content": _MARKER},
            {"role": "user", "content": "question"},
        ]
        special = {k: str(v) for k, v in config.items() if k.endswith("_token")}
        try:
            shown = render_source(template, messages, special, add_generation_prompt=True)
        except TreegenError:
            shown = _MARKER  # the template rejects system texts, so no run can have begun
        if _MARKER not in shown:
            yield _of_run(
                view,
                "high",
                "system-text-dropped",
                "the chat template does not show the system text, so the model never read it",
                "put the text into the user's turn",
                system,
            )
    if config.get("add_bos_token") is False and config.get("bos_token"):
        needs = any(name in str(config.get("model_type")) for name in _NEEDS_BOS)
        if needs and not any(_BOS.match(text) for text in texts.values()) and not is_chat:
            yield _of_run(
                view,
                "medium",
                "begin-token-missing",
                "the tokenizer adds no begin-of-text token, with which this family was trained",
                "set add_bos_token in tokenizer_config.json, and compare",
                next(iter(texts.values()), ""),
            )


def _tokenizer_config(model: str) -> dict[str, Any]:
    """Return the settings of a local tokenizer, with the model's type; empty if there is none."""
    config: dict[str, Any] = {}
    if not model or not os.path.isdir(model):
        return config
    for name in ("config.json", "tokenizer_config.json"):
        with suppress(OSError, ValueError, TreegenError):
            content = json.loads(read_text(Path(model) / name))
            config |= content if isinstance(content, dict) else {}
    with suppress(OSError, ValueError, TreegenError):
        config["chat_template"] = read_text(Path(model) / "chat_template.jinja")
    bos = config.get("bos_token")
    return config | ({"bos_token": bos.get("content")} if isinstance(bos, dict) else {})


def _shortened(view: RunView) -> Iterator[Finding]:
    with suppress(TreegenError), RunDir.open(view.path) as run:
        results: Any = run.results() or {}
        count = results.get("shortened") if isinstance(results, dict) else None
        if isinstance(count, int) and count > 0:
            yield Finding(
                kind="prompt-shortened",
                area="prompts",
                severity=severity_of(count, view.num_done, high=0.01, medium=0.0),
                count=count,
                total=view.num_done,
                unit="samples",
                message="the prompt did not fit, so a part of it was left out",
                advice="use fewer examples, or a model with a longer context",
            )


def _of_run(
    view: RunView, severity: Any, kind: str, message: str, advice: str, example: str
) -> Finding:
    return Finding(
        kind=kind,
        area="prompts",
        severity=severity,
        count=1,
        total=1,
        unit="runs",
        message=message,
        advice=advice,
        example=example[-200:],
    )


def _finding(
    texts: Mapping[str, str],
    cases: Mapping[str, str],
    severity: Any,
    kind: str,
    message: str,
    advice: str,
) -> Finding:
    """Return a finding on prompts.

    Args:
        texts: All prompts, by problem.
        cases: Those with the defect.
        severity: The severity.
        kind: The name of the finding.
        message: What is wrong.
        advice: What to do.
    """
    name, text = next(iter(cases.items()))
    return Finding(
        kind=kind,
        area="prompts",
        severity=severity,
        count=len(cases),
        total=len(texts),
        unit="problems",
        message=message,
        advice=advice,
        example=text,
        problem_id=name,
    )
