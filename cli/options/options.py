"""The options that several commands share, and their translation into settings."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.cli.options.pairs import CONFIDENCE, GEN_KWARGS, MODEL_ARGS, read_pairs
from treegen.common.files.read_errors import describe_read_error
from treegen.common.files.regular_files import read_text
from treegen.errors import InputError
from treegen.model.options import EngineOptions

if TYPE_CHECKING:
    from treegen.evals.scoring.code_execution import ExecutionOptions

_MOST: Final = 9_999_999
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _hyphens(name: str) -> str:
    return name.replace("_", "-")


# --top_p is accepted as --top-p.
CONTEXT: Final = {
    "token_normalize_func": _hyphens,
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}


def add_options(*options: Decorator) -> Decorator:
    """Return a decorator that adds options to a command, in their order."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_TASK: Final = (
    click.argument("names", nargs=-1, metavar="[TASK]..."),
    click.option(
        "--tasks",
        "-t",
        "more_names",
        multiple=True,
        metavar="TASK[,TASK]",
        help="More tasks; the same as naming them.",
    ),
    click.option(
        "--include-path",
        metavar="DIR",
        help="A folder of lm-eval's kind of YAML files, for lm-eval:TASK.",
    ),
)
_DATA: Final = (
    click.option(
        "--data",
        "--haystack",
        "data",
        metavar="PATH",
        help="Problems: a JSONL file, a folder of splits, a text (needle), or a "
        "name the task knows (hf). Default: the small set that comes with treegen.",
    ),
    click.option("--split", metavar="NAME", help="Split of a folder or a named data set."),
    click.option("--num-fewshot", "-f", type=int, help="Solved examples before each problem."),
    click.option("--fewshot-file", metavar="FILE", help="JSONL of examples, used from its start."),
    click.option(
        "--fewshot-data",
        metavar="PATH",
        help="Draw examples by seed from here; 'train' is the data's own train split.",
    ),
    click.option(
        "--limit",
        "-L",
        metavar="N|0.1|10-20",
        help="The first N problems, a fraction, or a range counted from 1.",
    ),
    click.option(
        "--sample-id", "ids", multiple=True, metavar="ID", help="Run this problem; may be repeated."
    ),
)


_LOADING: Final = (
    click.option(
        "--dtype",
        metavar="TYPE",
        help="auto, float32, bfloat16 or float16. Default: auto, the checkpoint's.",
    ),
    click.option(
        "--quantization",
        metavar="TYPE",
        help="fp8: matrices in 8 bits, for GPUs that "
        "multiply them. mxfp4: keep gpt-oss's experts in 4 bits. none: expand what is "
        "stored in 8 or 4 bits.",
    ),
    click.option(
        "--kv-cache-dtype",
        metavar="TYPE",
        help="fp8: keys and values in 8 bits, so that twice as many fit.",
    ),
    click.option(
        "--device",
        metavar="NAME",
        help="auto, cpu, cuda or cuda:N. Default: auto, a GPU if there is one.",
    ),
    click.option(
        "--memory",
        metavar="SIZE",
        help="For keys and values, such as 2GiB. Default: by what is free.",
    ),
    click.option(
        "--max-rows",
        "--batch-size",
        "-b",
        metavar="N|auto",
        help="Samples decoded at once at most. Default: auto.",
    ),
    click.option(
        "--sharing",
        metavar="HOW",
        help="auto, all, one or off: which parts of the tree "
        "are read once for all samples below. Default: auto.",
    ),
    click.option(
        "--tensor-parallel-size",
        "--tp",
        type=int,
        metavar="N",
        help="Divide the model among N GPUs of a machine.",
    ),
    click.option(
        "--reproducible",
        is_flag=True,
        help="On a GPU, compute each sample to the bit as if it were alone, a few percent slower.",
    ),
    click.option(
        "--eager",
        is_flag=True,
        help="On a GPU, start at once: no compiling, no CUDA graphs. Longer runs are slower.",
    ),
)
_MODEL: Final = (
    click.option("--model", "-M", metavar="DIR|NAME", help="Checkpoint directory or hub name."),
    click.option(
        "--model-args", multiple=True, metavar="K=V,...", help=f"Any of {', '.join(MODEL_ARGS)}."
    ),
    click.option(
        "--adapter",
        multiple=True,
        metavar="DIR|NAME",
        help="A LoRA adapter saved by "
        "peft, merged into the model as it loads. `eval` takes several, a run each.",
    ),
    click.option("--images", is_flag=True, help="Take images, of a family that reads them."),
    *_LOADING,
    click.option(
        "--speculate",
        metavar="HOW",
        help="ngram: guess tokens by other samples and the "
        "prompt, so that a pass draws several. Samples stay the same.",
    ),
    click.option(
        "--draft-model",
        metavar="DIR|NAME",
        help="A small model with the same tokenizer, which guesses tokens. Samples stay the same.",
    ),
    click.option(
        "--draft-tokens",
        type=int,
        metavar="N",
        help="Tokens of a sample that are guessed for a pass at most. Default: 12.",
    ),
    click.option(
        "--trust-remote-code",
        is_flag=True,
        help="Run code that comes with the model; "
        "from the hub only with a pinned revision. Never remembered: say it for each "
        "command.",
    ),
)
_CLUSTER: Final = (
    click.option(
        "--gpus",
        metavar="all|N|0,2",
        help="Several GPUs, each with the model and a part of the work.",
    ),
    click.option("--workers", type=int, metavar="N", help="Several workers on CPUs instead."),
    click.option(
        "--ray",
        metavar="ADDRESS",
        help="Workers of the Ray cluster at HOST:PORT, or "
        "auto for one on this machine. Default: a Ray of the command's own.",
    ),
)
_DRAWING: Final = (
    click.option("--temperature", type=float, help="0 is greedy. Default: the task's."),
    click.option("--top-p", type=float, help="Keep tokens up to this chance; 1 keeps all."),
    click.option("--top-k", type=int, help="Keep this many tokens; 0 keeps all."),
    click.option("--min-p", type=float, help="Keep tokens this share as likely as the first."),
    click.option(
        "--gen-kwargs", multiple=True, metavar="K=V,...", help=f"Any of {', '.join(GEN_KWARGS)}."
    ),
)
_SAMPLING: Final = (
    click.option(
        "--n-samples",
        "-n",
        "--epochs",
        "--repeats",
        "num_samples",
        type=int,
        help="Samples per problem. Default: the task's.",
    ),
    click.option(
        "--sampling",
        "sampling_from",
        metavar="HOW",
        help="recommended: what the "
        "checkpoint's generation_config.json says, where no option does. Default: task.",
    ),
    *_DRAWING,
    click.option("--max-tokens", type=int, help="Tokens per sample at most. Default: the task's."),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        help=r"Ends a sample; may be repeated, "
        r"replaces the task's own. \n and \t are a newline and a tab.",
    ),
    click.option("--seed", type=int, help="Seed of samples and of drawn examples. Default: 0."),
    click.option("--json-schema", metavar="FILE", help="Samples must be JSON of this schema."),
    click.option(
        "--apply-chat-template", is_flag=True, help="Put prompts in the model's chat format."
    ),
    click.option(
        "--fewshot-as-multiturn/--no-fewshot-as-multiturn",
        default=None,
        help="In chat, a turn for each solved example, or one user turn for all. "
        "Default: a turn for each.",
    ),
    click.option(
        "--reasoning",
        metavar="HOW",
        help="In chat, let the model think: on, off, low, "
        "medium, high, or auto for its own default.",
    ),
    click.option(
        "--max-thinking-tokens",
        type=int,
        metavar="N",
        help="Tokens of thinking at most; then it is closed, and the answer follows.",
    ),
    click.option(
        "--reasoning-tags",
        nargs=2,
        metavar="OPEN CLOSE",
        help="Around a thinking. "
        "Default: those that the model is known by, such as <think> </think>.",
    ),
    click.option(
        "--thinking-end",
        metavar="TEXT",
        help=r"Closes a thinking that used its tokens "
        r"up. Default: the closing tag after \n and before two.",
    ),
    click.option(
        "--system-instruction",
        metavar="TEXT",
        help="A system turn; without a chat template, text before every prompt.",
    ),
)
_ARGUMENTS: Final = (
    click.option(
        "--task-arg",
        "-T",
        "task_args",
        multiple=True,
        metavar="NAME=VALUE",
        help="An argument of the task's own, as `treegen tasks` lists them.",
    ),
)
_EXECUTION: Final = (
    click.option(
        "--allow-code-execution",
        "--confirm-run-unsafe-code",
        "allow_code_execution",
        is_flag=True,
        help="Let tasks such as apps run the programs that a model wrote, "
        "in a sandbox. Never remembered: say it for each command.",
    ),
    click.option(
        "--sandbox",
        metavar="NAME",
        help="auto, bubblewrap, landlock, or none for no protection at all. Default: auto.",
    ),
    click.option(
        "--num-workers",
        "--n-workers",
        "num_workers",
        type=int,
        help="Programs run at once. Default: one per core.",
    ),
)
OUTPUT: Final = add_options(
    click.option(
        "--output-path",
        "-o",
        "output",
        metavar="DIR",
        help="Run directory. Default: a new one in runs/.",
    ),
    click.option(
        "--resume",
        is_flag=False,
        flag_value="",
        metavar="[DIR]",
        help="Continue the run "
        "in DIR with the settings it has; without DIR, begin or continue the one in "
        "--output-path.",
    ),
)
_READING: Final = (
    click.option(
        "--data", metavar="PATH", help="Where the problems are now, if not where they were."
    ),
    click.option(
        "--task",
        metavar="FILE.py:CLASS",
        help="The task of the run, if it has code of its own, which runs.",
    ),
)
_TASK_CODE: Final = (
    click.option(
        "--allow-task-code",
        is_flag=True,
        help="Run the code that the run names: of a "
        "task or a method in a file, or of an installed package. Never remembered: say it "
        "for each command.",
    ),
)
_STOPPING: Final = (
    click.option(
        "--stop-when",
        metavar="decided[:0.95]|never",
        help="Draw no further samples of a "
        "problem once its leading answer stays ahead with this chance.",
    ),
    click.option(
        "--stop-batch",
        type=int,
        metavar="N",
        help="Ask so after every N samples of a problem. Default: 8.",
    ),
    click.option(
        "--confidence",
        is_flag=False,
        flag_value="",
        metavar="K=V,...",
        help="Store how confident the model was in each sample: any of "
        f"{', '.join(CONFIDENCE)}. With keep=SHARE, samples that are less confident than "
        "all but this share of the problem's first ones end at once (DeepConf).",
    ),
    click.option("--self-certainty", is_flag=True, help="Store the self-certainty of each sample."),
)
_REPORT: Final = (
    click.option("--k", "pass_ks", metavar="1,10,100", help="Report pass@k for these k."),
    click.option("--maj", "maj_ks", metavar="8,40", help="Report maj@k for these k."),
    click.option(
        "--votes",
        metavar="all|NUMBER[:RULE],...",
        help="Report votes beside maj@k: by "
        "logprob, likelihood, certainty, confidence, lowest, bottom, tail, score or usc; "
        "weighted, borda=P, top=SHARE or best.",
    ),
)
# Flags whose absence means something other than their --no- form.
_DENIABLE: Final = ("fewshot_as_multiturn", "score")
ALL_FILTERS: Final = click.option(
    "--all-filters", is_flag=True, help="Show the results of every filter, not of the first only."
)
WRITE_OUT: Final = click.option(
    "--write-out", is_flag=True, help="Print each task's first prompt, as the model gets it."
)
_WANTED: Final = f"{__name__}.json"


def _note(ctx: click.Context, _: click.Parameter, given: bool) -> bool:
    if given:
        ctx.meta[_WANTED] = True
    return given


JSON: Final = click.option(
    "--json",
    is_flag=True,
    expose_value=False,
    callback=_note,
    help="Print the results as one line of JSON, in place of tables.",
)
_QUIET: Final = click.option(
    "--quiet", "-q", is_flag=True, help="Print warnings only; with --json the JSON too."
)
QUIET: Final = add_options(_QUIET, JSON)


def is_json_requested() -> bool:
    """Return whether the running command has --json."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(_WANTED))


def add_option_groups(*groups: str) -> Decorator:
    """Return a decorator that adds groups of options, by their names below."""
    known: dict[str, tuple[Decorator, ...]] = {
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

    return add_options(*(option for group in groups for option in known[group]))


def collect_choices(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user typed, by the names of settings."""
    # Its package is slow to import, and help does not need it.
    from treegen.evals.arguments import read_arguments

    given = {
        name: value
        for name, value in params.items()
        if value is not None and value != () and (value is not False or name in _DENIABLE)
    }
    if "adapter" in given:
        given["adapter"], *more = given["adapter"]
        if more:
            raise InputError("only `treegen eval` takes several adapters; give one --adapter")
    for flag, readers in (("model_args", MODEL_ARGS), ("gen_kwargs", GEN_KWARGS)):
        pairs = read_pairs(given.pop(flag, ()), f"--{_hyphens(flag)}", readers)
        if pairs.pop("do_sample", True) is False:
            pairs["temperature"] = 0.0
        for name, value in pairs.items():
            if name in given and given[name] != value:
                raise InputError(
                    f"{name} is {given[name]!r} by its own option and {value!r} in "
                    f"--{_hyphens(flag)}; give it once"
                )
            given[name] = value
    if extra := read_arguments(given.pop("task_args", ())):
        given["extra"] = extra
    return {name: _READERS[name](v) if name in _READERS else v for name, v in given.items()}


def pop_execution_options(
    params: dict[str, Any], *, anew: bool = False
) -> "ExecutionOptions | None":
    """Remove the permission to run programs from a command's parameters; None without it.

    Args:
        params: The parameters; the permission is removed from them.
        anew: Whether samples that have a verdict are judged again. Default: False.
    """
    from treegen.evals.pipeline.program_scoring import make_execution_options

    names = ("allow_code_execution", "sandbox", "num_workers")
    return make_execution_options(*(params.pop(name) for name in names), anew=anew)


def task_names(params: dict[str, Any]) -> list[str]:
    """Remove the tasks from the parameters, and return them in the user's order."""
    words = [*params.pop("names"), *params.pop("more_names")]
    folder = params.pop("include_path", None)
    names = [name for word in words for name in _expand_tasks(word, folder)]
    if folder is not None and not any("@" in name for name in names):
        raise InputError("--include-path is for tasks that are named lm-eval:TASK; leave it out")
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"task {name!r} is named twice; name each task once")
    return names


def _expand_tasks(word: str, folder: str | None) -> list[str]:
    """Return the tasks in a word; if it begins with lm-eval:, all are lm-eval's."""
    # Its package is slow to import, and help does not need it.
    from treegen.evals.registry import LM_EVAL

    names = [name.strip() for name in word.split(",") if name.strip()]
    if not word.strip().startswith(LM_EVAL):
        return names
    whole = [f"{LM_EVAL}{name.removeprefix(LM_EVAL)}" for name in names]
    return [name if folder is None or "@" in name else f"{name}@{folder}" for name in whole]


def _unescape(text: str) -> str:
    # These characters are hard to type in a shell.
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


def _read_schema(file: str) -> str:
    try:
        return read_text(file)
    except OSError as error:
        raise InputError(
            f"--json-schema cannot be read: {describe_read_error(file, error)}"
        ) from None
    except ValueError as error:
        raise InputError(
            f"--json-schema: {file} cannot be read: {error}; save it as UTF-8"
        ) from None


def _confidence(text: str) -> dict[str, Any]:
    found = read_pairs([text], "--confidence", CONFIDENCE)
    if "warmup" in found and "keep" not in found:
        raise InputError(
            "--confidence warmup is of no use without keep, which ends samples; give keep=SHARE too"
        )
    return found


def _ks(text: str, flag: str) -> tuple[int, ...]:
    return tuple(sorted(set(whole_numbers(text, flag))))


def _rows(value: object) -> int | None:
    if isinstance(value, int):
        return value
    if str(value).strip() == "auto":
        return None
    if not str(value).strip().isdecimal():
        raise InputError(f"--max-rows must be a whole number or auto, got {value!r}")
    return int(str(value))


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "stop": lambda texts: tuple(map(_unescape, texts)),
    "json_schema": _read_schema,
    "thinking_end": _unescape,
    "max_rows": _rows,
    "confidence": _confidence,
    "pass_ks": partial(_ks, flag="--k"),
    "maj_ks": partial(_ks, flag="--maj"),
}


def whole_numbers(text: str, flag: str, least: int = 0) -> tuple[int, ...]:
    """Return the comma-separated whole numbers in a text.

    Args:
        text: The text.
        flag: The name of the option, for the error message.
        least: The smallest allowed number. Default: 0.

    Raises:
        InputError: the text has another form.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(is_number(word, least) for word in words):
        raise InputError(
            f"{flag} must be whole numbers from {least} to {_MOST:,} with commas between, "
            f"got {text!r}"
        )
    return tuple(map(int, words))


def is_number(word: str, least: int = 1) -> bool:
    """Whether a word is a whole number from `least` up to the largest allowed number."""
    # Count the digits first, because Python rejects numbers with thousands of digits.
    is_short = word.isascii() and word.isdecimal() and len(word) <= len(str(_MOST))
    return is_short and least <= int(word) <= _MOST


def engine_of(params: Mapping[str, Any]) -> EngineOptions:
    """Return the model that the user named, and how it computes."""
    given = collect_choices(params)
    if "model" not in given:
        raise InputError("--model is missing; give a checkpoint directory, a hub name or demo")
    return EngineOptions(**given)
