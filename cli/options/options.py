"""The options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from treegen.cli.options.pairs import CONFIDENCE, GEN_KWARGS, MODEL_ARGS

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def hyphenate(name: str) -> str:
    """Return the name of an option with hyphens for underscores."""
    return name.replace("_", "-")


# --top_p is accepted as --top-p.
CONTEXT: Final = {
    "token_normalize_func": hyphenate,
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}


def add_options(*options: Decorator) -> Decorator:
    """Return a decorator that adds options to a command, in their order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for decorator in reversed(options):
            function = decorator(function)
        return function

    return decorate


class _FilePath(click.Path):
    """A path that is not empty: an empty one, as of an unset variable, is the current directory."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; a usage error if it is empty.

        Args:
            value: The path, as text.
            param: The option or argument.
            ctx: The context of the command.
        """
        if value == "":
            self.fail("the path is empty; choose another path", param, ctx)
        try:
            return super().convert(value, param, ctx)
        except ValueError as error:  # a file of options may contain a NUL
            self.fail(f"{error}; choose another path", param, ctx)


# treegen says itself what to do about a path that cannot be read.
PATH: Final = _FilePath(readable=False, path_type=Path)
_TEXT_PATH: Final = _FilePath(readable=False)
_PATHS: Final = ("DIR", "PATH", "FILE")


def option(usage: str, help: str, name: str | None = None, **kwargs: Any) -> Decorator:
    """Return an option, written as its help shows it.

    An option without a metavar, a type and a default is a flag. A default is shown unless it is
    empty or "auto".

    Args:
        usage: The names and the metavar, such as "--output-path -o DIR".
        help: The help text.
        name: The name of the command's parameter. Default: the first long name.
        kwargs: Further arguments of `click.option`.
    """
    names = [word for word in usage.split() if word.startswith("-")]
    metavar = " ".join(usage.split()[len(names) :]) or None
    if metavar is None and kwargs.keys().isdisjoint(("type", "default", "flag_value")):
        kwargs["is_flag"] = True
    if metavar in _PATHS:
        kwargs.setdefault("type", _TEXT_PATH)
    kwargs.setdefault("show_default", kwargs.get("default") not in (None, "", "auto"))
    names += [] if name is None else [name]
    return click.option(*names, metavar=metavar, help=help or None, **kwargs)


RUN: Final = click.argument("run", type=PATH)
RUNS: Final = click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN]...", type=PATH)
# The options of each group, by the name that `add_option_groups` takes.
_GROUPS: Final[dict[str, tuple[Decorator, ...]]] = {}
_GROUPS["task"] = (
    click.argument("names", nargs=-1, metavar="[TASK]..."),
    option(
        "--tasks -t TASK[,TASK]",
        "Tasks to run; the same as the TASK arguments.",
        "more_names",
        multiple=True,
    ),
    option("--include-path DIR", "Folder of YAML files in lm-eval's format, for lm-eval:TASK."),
)
_GROUPS["data"] = (
    option(
        "--data --haystack PATH",
        "Problems: a JSONL file, a folder of splits, or a name such as hf; for needle tasks, the "
        "text to use as haystack. Default: the problems bundled with treegen.",
    ),
    option("--split NAME", "Split of a folder or of a data set on the hub."),
    option(
        "--num-fewshot -f",
        "Few-shot examples before each problem. Default: all examples of --fewshot-file, or the "
        "task's number.",
        type=int,
    ),
    option("--fewshot-file FILE", "JSONL file whose first lines are the few-shot examples."),
    option(
        "--fewshot-data PATH",
        "File or folder to draw few-shot examples from, with --seed; train is the data's train "
        "split.",
    ),
    option(
        "--limit -L N|0.1|10-20",
        "Run the first N problems, a fraction of them, or a range counted from 1.",
    ),
    option("--sample-id ID", "Run only this problem; may be repeated.", "ids", multiple=True),
)
_LOADING: Final = (
    option(
        "--dtype TYPE",
        "auto, float32, bfloat16 or float16. Default: auto, the checkpoint's type on a GPU and "
        "float32 on a CPU.",
    ),
    option(
        "--quantization TYPE",
        "fp8: round weight matrices to 8 bits on load. mxfp4, nvfp4: keep stored 4-bit weights. "
        "none: dequantize stored 8-bit or 4-bit weights.",
    ),
    option(
        "--kv-cache-dtype TYPE",
        "fp8: store keys and values in 8 bits. Default: auto, the type of --dtype.",
    ),
    option("--device NAME", "auto, cpu, cuda or cuda:N. Default: auto, a GPU if there is one."),
    option(
        "--memory SIZE",
        "Size of the KV cache, such as 2GiB. Default: derived from the free memory.",
    ),
    option(
        "--max-rows --batch-size -b N|auto",
        "Maximum samples decoded at once. Default: auto, 256 on a CPU and 4096 on a GPU.",
    ),
    option(
        "--sharing HOW",
        "Prefixes that are read once for all samples below them: all, one (only the first level), "
        "off, or auto (where it saves time). Default: auto.",
    ),
    option(
        "--tensor-parallel-size --tp N",
        "Split the model across N GPUs of one machine. Default: 1.",
        type=int,
    ),
    option(
        "--reproducible",
        "On a GPU, draw bit-identical samples in any batch, at some cost in speed.",
    ),
    option("--eager", "On a GPU, skip compiling and CUDA graphs: faster start, slower decoding."),
)
_GROUPS["trust"] = (
    option(
        "--trust-remote-code",
        "Run the code of the model's repository; a hub name needs a pinned revision. Not stored: "
        "pass it to every command.",
    ),
)
_GROUPS["judge model"] = (*_LOADING, *_GROUPS["trust"])
_GROUPS["model"] = (
    option(
        "--model -M DIR|NAME",
        "Checkpoint directory, hub name, or a bundled model: demo, demo-agent.",
    ),
    option(
        "--model-args K=V,...",
        f"Options of the model, by name: {', '.join(MODEL_ARGS)}.",
        multiple=True,
    ),
    option(
        "--adapter DIR|NAME",
        "LoRA adapter saved by peft, merged into the model on load. Only `eval` takes several: "
        "one run for each.",
        multiple=True,
    ),
    option("--images", "Load the vision tower and accept images, if the model's family can."),
    option(
        "--chat-template TEMPLATE",
        "Jinja chat template, or a file with one, that replaces the tokenizer's own.",
    ),
    *_LOADING,
    option(
        "--speculate HOW",
        "ngram: draft tokens from the prompt and other samples. Samples stay the same up to "
        "rounding. Default: off.",
    ),
    option(
        "--draft-model DIR|NAME",
        "Small model with the same tokenizer that drafts tokens. Samples stay the same up to "
        "rounding.",
    ),
    option(
        "--draft-tokens N",
        "Maximum draft tokens per sample and forward pass. Default: 12.",
        type=int,
    ),
    *_GROUPS["trust"],
)
_GROUPS["cluster"] = (
    option("--gpus all|N|0,2", "GPUs that each load the whole model and do a part of the work."),
    option("--workers N", "CPU workers that each load the whole model, instead of GPUs.", type=int),
    option(
        "--ray ADDRESS",
        "Use the Ray cluster at HOST:PORT, or auto for one running on this machine. Default: "
        "start a private Ray.",
    ),
)
_GROUPS["drawing"] = (
    option("--temperature", "Sampling temperature; 0 is greedy. Default: the task's.", type=float),
    option(
        "--top-p",
        "Keep the most likely tokens up to this total probability; 1 keeps all.",
        type=float,
    ),
    option("--top-k", "Keep this many of the most likely tokens; 0 keeps all.", type=int),
    option(
        "--min-p",
        "Keep tokens with at least this fraction of the highest probability; 0 keeps all.",
        type=float,
    ),
    option(
        "--gen-kwargs K=V,...",
        f"Sampling parameters, by name: {', '.join(GEN_KWARGS)}.",
        multiple=True,
    ),
)
_GROUPS["sampling"] = (
    option(
        "--n-samples -n --num-samples --epochs --repeats",
        "Samples per problem. Default: the task's.",
        "num_samples",
        type=int,
    ),
    option(
        "--sampling HOW",
        "Source of parameters that no option sets: task, or recommended (the checkpoint's "
        "generation_config.json). Default: task.",
        "sampling_from",
    ),
    *_GROUPS["drawing"],
    option("--max-tokens", "Maximum tokens per sample. Default: the task's.", type=int),
    option(
        "--stop TEXT",
        r"Stop string, instead of the task's; may be repeated. \n is a newline, \t a "
        "tab.",
        multiple=True,
    ),
    option("--seed", "Seed of samples and of randomly drawn examples. Default: 0.", type=int),
    option("--json-schema FILE", "JSON schema that every sample follows."),
    option(
        "--apply-chat-template",
        "Render prompts with the model's chat template. Default: prompts are plain text.",
    ),
    option(
        "--fewshot-as-multiturn/--no-fewshot-as-multiturn",
        "With a chat template: a user and an assistant turn for each few-shot example, or one "
        "user turn for all. Default: separate turns.",
        default=None,
    ),
    option(
        "--reasoning HOW",
        "With a chat template: on, off, low, medium, high, or auto (the template's default).",
    ),
    option(
        "--max-thinking-tokens N",
        "Maximum reasoning tokens; then treegen ends the reasoning, and the answer follows.",
        type=int,
    ),
    option(
        "--reasoning-tags OPEN CLOSE",
        "Tags around the reasoning. Default: the model's, if treegen knows them.",
        nargs=2,
    ),
    option(
        "--thinking-end TEXT",
        r"Text that ends the reasoning at --max-thinking-tokens. Default: \n, the closing tag, "
        r"\n\n.",
    ),
    option(
        "--system-instruction TEXT",
        "System turn; without a chat template, text before every prompt.",
    ),
)
_GROUPS["arguments"] = (
    option(
        "--task-arg -T NAME=VALUE",
        "Argument of the task; `treegen tasks NAME` lists them.",
        "task_args",
        multiple=True,
    ),
)
_GROUPS["execution"] = (
    option(
        "--allow-code-execution --confirm-run-unsafe-code",
        "Run programs that the model wrote, in a sandbox; tasks such as apps need it. Not stored: "
        "pass it to every command.",
    ),
    option(
        "--sandbox NAME",
        "auto, bubblewrap, landlock, or none for no protection at all. Default: auto.",
    ),
    option(
        "--num-workers --n-workers",
        "Maximum number of programs that run at once. Default: one per core.",
        type=int,
    ),
)
OUTPUT: Final = add_options(
    option("--output-path -o DIR", "Run directory. Default: a new one in runs/.", "output"),
    option(
        "--resume [DIR]",
        "Continue the run in DIR with its settings; without DIR, start or continue the run in "
        "--output-path.",
        is_flag=False,
        flag_value="",
    ),
)
_GROUPS["task code"] = (
    option(
        "--allow-task-code",
        "Run task and method code that the run names, in a file or an installed package. Not "
        "stored: pass it to every command.",
    ),
)
_GROUPS["reading"] = (
    option("--data PATH", "Current path of the run's problems, if they have moved."),
    option("--task FILE.py:CLASS", "Run this code as the run's task, if the task is in a file."),
    *_GROUPS["task code"],
)
_GROUPS["stopping"] = (
    option(
        "--stop-when decided[:0.95]|never",
        "Stop sampling a problem once its leading answer stays ahead with this probability. "
        "Default: never.",
    ),
    option(
        "--stop-batch N",
        "Samples per problem between two checks of --stop-when. Default: 8.",
        type=int,
    ),
    option(
        "--confidence K=V,...",
        f"Store the model's confidence in each sample; settings: {', '.join(CONFIDENCE)}. keep=0.9 "
        "ends a sample that is less confident than 90% of the problem's first samples (DeepConf).",
        is_flag=False,
        flag_value="",
    ),
    option("--self-certainty", "Store the self-certainty of each sample."),
)
_GROUPS["report"] = (
    option("--k 1,10,100", "Report pass@k for these k.", "pass_ks"),
    option("--maj 8,40", "Report maj@k for these k.", "maj_ks"),
    option("--pass-hat-k 4,8", "Report pass^k and G-Pass@k for these k, or none.", "pass_hat_ks"),
    option(
        "--votes all|NUMBER[:RULE],...",
        "Report weighted votes next to maj@k. Numbers: logprob, likelihood, certainty, "
        "confidence, lowest, bottom, tail, score, usc. Rules: weighted, borda=P, top=SHARE, best.",
    ),
)
ALL_FILTERS: Final = option("--all-filters", "Show results of every filter, not only the first.")
WRITE_OUT: Final = option("--write-out", "Print the first prompt of each task.")


def verifier_options(help: str) -> Decorator:
    """Return a decorator that adds a verifier with this help text, and the verifier's settings."""
    return add_options(
        option("--verifier DIR|NAME", help),
        option(
            "--verifier-arg NAME=VALUE",
            "Option of the verifier, as in `treegen verify`: mark, separator, tokens, label, "
            "reduce, chat, turns.",
            "verifier_args",
            multiple=True,
        ),
        option("--verifier-memory SIZE", "Size of the verifier's KV cache. Default: 1GiB."),
    )


def _store_flag(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    ctx.meta[f"{__name__}.{param.name}"] = value


JSON: Final = option(
    "--json",
    "Print the results as one line of JSON instead of tables.",
    expose_value=False,
    callback=_store_flag,
)
_QUIET: Final = option(
    "--quiet -q",
    "Print only warnings, and the JSON of --json.",
    expose_value=False,
    callback=_store_flag,
)
QUIET: Final = add_options(_QUIET, JSON)


def is_json_requested() -> bool:
    """Return whether the running command has --json."""
    return _is_flag_set("json")


def is_quiet() -> bool:
    """Return whether the running command has --quiet."""
    return _is_flag_set("quiet")


def _is_flag_set(name: str) -> bool:
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(f"{__name__}.{name}"))


def add_option_groups(*groups: str) -> Decorator:
    """Return a decorator that adds groups of options, by their names."""
    return add_options(*(option for group in groups for option in _GROUPS[group]))
