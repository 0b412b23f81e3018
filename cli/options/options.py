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


PATH: Final = click.Path(path_type=Path)


def option(usage: str, help: str, name: str | None = None, **how: Any) -> Decorator:
    """Return an option, written as its help shows it.

    An option without a metavar, a type and a default is a flag. A default is shown unless it is
    empty or "auto".

    Args:
        usage: The names and the metavar, such as "--output-path -o DIR".
        help: The help text.
        name: The name of the command's parameter. Default: the first long name.
        how: Further arguments of `click.option`.
    """
    names = [word for word in usage.split() if word.startswith("-")]
    metavar = " ".join(usage.split()[len(names) :]) or None
    if metavar is None and how.keys().isdisjoint(("type", "default", "flag_value")):
        how["is_flag"] = True
    how.setdefault("show_default", how.get("default") not in (None, "", "auto"))
    names += [] if name is None else [name]
    return click.option(*names, metavar=metavar, help=help or None, **how)


RUN: Final = click.argument("run", type=PATH)
RUNS: Final = click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN]...", type=PATH)
_TASK: Final = (
    click.argument("names", nargs=-1, metavar="[TASK]..."),
    option(
        "--tasks -t TASK[,TASK]",
        "More tasks; the same as naming them.",
        "more_names",
        multiple=True,
    ),
    option("--include-path DIR", "A folder of lm-eval's kind of YAML files, for lm-eval:TASK."),
)
_DATA: Final = (
    option(
        "--data --haystack PATH",
        "Problems: a JSONL file, a folder of splits, a text (needle), or a name the task knows "
        "(hf). Default: the small set that comes with treegen.",
    ),
    option("--split NAME", "Split of a folder or a named data set."),
    option("--num-fewshot -f", "Solved examples before each problem.", type=int),
    option("--fewshot-file FILE", "JSONL of examples, used from its start."),
    option(
        "--fewshot-data PATH",
        "Draw examples by seed from here; 'train' is the data's own train split.",
    ),
    option(
        "--limit -L N|0.1|10-20", "The first N problems, a fraction, or a range counted from 1."
    ),
    option("--sample-id ID", "Run this problem; may be repeated.", "ids", multiple=True),
)


_LOADING: Final = (
    option("--dtype TYPE", "auto, float32, bfloat16 or float16. Default: auto, the checkpoint's."),
    option(
        "--quantization TYPE",
        "fp8: matrices in 8 bits, for GPUs that multiply them. mxfp4, nvfp4: keep what is stored "
        "so in 4 bits. none: expand what is stored in 8 or 4 bits.",
    ),
    option("--kv-cache-dtype TYPE", "fp8: keys and values in 8 bits, so that twice as many fit."),
    option("--device NAME", "auto, cpu, cuda or cuda:N. Default: auto, a GPU if there is one."),
    option("--memory SIZE", "For keys and values, such as 2GiB. Default: by what is free."),
    option("--max-rows --batch-size -b N|auto", "Samples decoded at once at most. Default: auto."),
    option(
        "--sharing HOW",
        "auto, all, one or off: which parts of the tree are read once for all samples below. "
        "Default: auto.",
    ),
    option(
        "--tensor-parallel-size --tp N", "Divide the model among N GPUs of a machine.", type=int
    ),
    option(
        "--reproducible",
        "On a GPU, compute each sample to the bit as if it were alone, a few percent slower.",
    ),
    option(
        "--eager", "On a GPU, start at once: no compiling, no CUDA graphs. Longer runs are slower."
    ),
)
_MODEL: Final = (
    option("--model -M DIR|NAME", "Checkpoint directory or hub name."),
    option("--model-args K=V,...", f"Any of {', '.join(MODEL_ARGS)}.", multiple=True),
    option(
        "--adapter DIR|NAME",
        "A LoRA adapter saved by peft, merged into the model as it loads. `eval` takes several, a "
        "run each.",
        multiple=True,
    ),
    option("--images", "Take images, of a family that reads them."),
    option("--chat-template FILE", "A Jinja chat template that replaces the tokenizer's own."),
    *_LOADING,
    option(
        "--speculate HOW",
        "ngram: guess tokens by other samples and the prompt, so that a pass draws several. "
        "Samples stay the same.",
    ),
    option(
        "--draft-model DIR|NAME",
        "A small model with the same tokenizer, which guesses tokens. Samples stay the same.",
    ),
    option(
        "--draft-tokens N",
        "Tokens of a sample that are guessed for a pass at most. Default: 12.",
        type=int,
    ),
    option(
        "--trust-remote-code",
        "Run code that comes with the model; from the hub only with a pinned revision. Never "
        "remembered: say it for each command.",
    ),
)
_CLUSTER: Final = (
    option("--gpus all|N|0,2", "Several GPUs, each with the model and a part of the work."),
    option("--workers N", "Several workers on CPUs instead.", type=int),
    option(
        "--ray ADDRESS",
        "Workers of the Ray cluster at HOST:PORT, or auto for one on this machine. Default: a Ray "
        "of the command's own.",
    ),
)
_DRAWING: Final = (
    option("--temperature", "0 is greedy. Default: the task's.", type=float),
    option("--top-p", "Keep tokens up to this chance; 1 keeps all.", type=float),
    option("--top-k", "Keep this many tokens; 0 keeps all.", type=int),
    option("--min-p", "Keep tokens this share as likely as the first.", type=float),
    option("--gen-kwargs K=V,...", f"Any of {', '.join(GEN_KWARGS)}.", multiple=True),
)
_SAMPLING: Final = (
    option(
        "--n-samples -n --num-samples --epochs --repeats",
        "Samples per problem. Default: the task's.",
        "num_samples",
        type=int,
    ),
    option(
        "--sampling HOW",
        "recommended: what the checkpoint's generation_config.json says, where no option does. "
        "Default: task.",
        "sampling_from",
    ),
    *_DRAWING,
    option("--max-tokens", "Tokens per sample at most. Default: the task's.", type=int),
    option(
        "--stop TEXT",
        r"Ends a sample; may be repeated, replaces the task's own. \n and \t are a newline and a "
        "tab.",
        multiple=True,
    ),
    option("--seed", "Seed of samples and of drawn examples. Default: 0.", type=int),
    option("--json-schema FILE", "Samples must be JSON of this schema."),
    option("--apply-chat-template", "Put prompts in the model's chat format."),
    option(
        "--fewshot-as-multiturn/--no-fewshot-as-multiturn",
        "In chat, a turn for each solved example, or one user turn for all. Default: a turn for "
        "each.",
        default=None,
    ),
    option(
        "--reasoning HOW",
        "In chat, let the model think: on, off, low, medium, high, or auto for its own default.",
    ),
    option(
        "--max-thinking-tokens N",
        "Tokens of thinking at most; then it is closed, and the answer follows.",
        type=int,
    ),
    option(
        "--reasoning-tags OPEN CLOSE",
        "Tags around the reasoning. Default: the model's known tags, such as <think> </think>.",
        nargs=2,
    ),
    option(
        "--thinking-end TEXT",
        r"Text inserted when the tokens of thinking are used up. Default: the closing tag after \n "
        "and before two.",
    ),
    option(
        "--system-instruction TEXT",
        "A system turn; without a chat template, text before every prompt.",
    ),
)
_ARGUMENTS: Final = (
    option(
        "--task-arg -T NAME=VALUE",
        "An argument of the task's own, as `treegen tasks` lists them.",
        "task_args",
        multiple=True,
    ),
)
_EXECUTION: Final = (
    option(
        "--allow-code-execution --confirm-run-unsafe-code",
        "Let tasks such as apps run the programs that a model wrote, in a sandbox. Never "
        "remembered: say it for each command.",
    ),
    option(
        "--sandbox NAME",
        "auto, bubblewrap, landlock, or none for no protection at all. Default: auto.",
    ),
    option("--num-workers --n-workers", "Programs run at once. Default: one per core.", type=int),
)
OUTPUT: Final = add_options(
    option("--output-path -o DIR", "Run directory. Default: a new one in runs/.", "output"),
    option(
        "--resume [DIR]",
        "Continue the run in DIR with the settings it has; without DIR, begin or continue the one "
        "in --output-path.",
        is_flag=False,
        flag_value="",
    ),
)
_READING: Final = (
    option("--data PATH", "Where the problems are now, if not where they were."),
    option("--task FILE.py:CLASS", "The task of the run, if it has code of its own, which runs."),
)
_TASK_CODE: Final = (
    option(
        "--allow-task-code",
        "Run the code that the run names: of a task or a method in a file, or of an installed "
        "package. Never remembered: say it for each command.",
    ),
)
_STOPPING: Final = (
    option(
        "--stop-when decided[:0.95]|never",
        "Draw no further samples of a problem once its leading answer stays ahead with this "
        "chance.",
    ),
    option(
        "--stop-batch N",
        "Samples of a problem between two checks of --stop-when. Default: 8.",
        type=int,
    ),
    option(
        "--confidence K=V,...",
        "Store how confident the model was in each sample: any of "
        f"{', '.join(CONFIDENCE)}. With keep=SHARE, samples that are less confident than "
        "all but this share of the problem's first ones end at once (DeepConf).",
        is_flag=False,
        flag_value="",
    ),
    option("--self-certainty", "Store the self-certainty of each sample."),
)
_REPORT: Final = (
    option("--k 1,10,100", "Report pass@k for these k.", "pass_ks"),
    option("--maj 8,40", "Report maj@k for these k.", "maj_ks"),
    option("--pass-hat-k 4,8", "Report pass^k and G-Pass@k for these k.", "pass_hat_ks"),
    option(
        "--votes all|NUMBER[:RULE],...",
        "Report votes beside maj@k: by logprob, likelihood, certainty, confidence, lowest, "
        "bottom, tail, score or usc; weighted, borda=P, top=SHARE or best.",
    ),
)
ALL_FILTERS: Final = option(
    "--all-filters", "Show the results of every filter, not of the first only."
)
WRITE_OUT: Final = option("--write-out", "Print each task's first prompt, as the model gets it.")


def _note(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    ctx.meta[f"{__name__}.{param.name}"] = wanted


JSON: Final = option(
    "--json",
    "Print the results as one line of JSON, in place of tables.",
    expose_value=False,
    callback=_note,
)
_QUIET: Final = option(
    "--quiet -q",
    "Print warnings only; with --json the JSON too.",
    expose_value=False,
    callback=_note,
)
QUIET: Final = add_options(_QUIET, JSON)


def is_json_requested() -> bool:
    """Return whether the running command has --json."""
    return _is_noted("json")


def is_quiet() -> bool:
    """Return whether the running command has --quiet."""
    return _is_noted("quiet")


def _is_noted(name: str) -> bool:
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(f"{__name__}.{name}"))


def add_option_groups(*groups: str) -> Decorator:
    """Return a decorator that adds groups of options, by their names below."""
    options: dict[str, tuple[Decorator, ...]] = {
        "task": _TASK,
        "data": _DATA,
        "arguments": _ARGUMENTS,
        "model": _MODEL,
        "cluster": _CLUSTER,
        "sampling": _SAMPLING,
        "drawing": _DRAWING,
        "stopping": _STOPPING,
        "report": _REPORT,
        "execution": _EXECUTION,
        "reading": (*_READING, *_TASK_CODE),
        "task code": _TASK_CODE,
        "trust": (_MODEL[-1],),
        "judge model": (*_LOADING, _MODEL[-1]),
    }

    return add_options(*(option for group in groups for option in options[group]))
