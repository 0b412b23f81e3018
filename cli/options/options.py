"""The options that several commands share."""

from collections.abc import Callable
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
    click.option(
        "--chat-template",
        metavar="FILE",
        help="A Jinja chat template that replaces the tokenizer's own.",
    ),
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
        "--num-samples",
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
ALL_FILTERS: Final = click.option(
    "--all-filters", is_flag=True, help="Show the results of every filter, not of the first only."
)
WRITE_OUT: Final = click.option(
    "--write-out", is_flag=True, help="Print each task's first prompt, as the model gets it."
)
_WANTED: Final = f"{__name__}.json"


def _note(ctx: click.Context, _: click.Parameter, wanted: bool) -> bool:
    if wanted:
        ctx.meta[_WANTED] = True
    return wanted


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
