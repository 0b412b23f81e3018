"""`treegen.evaluate` and `search_task`: the runs that the commands make, from Python."""

import gc
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import treegen
from treegen.api.run import Run, evaluate, search_task
from treegen.cli.eval import command as eval_command
from treegen.cli.search import command as search_command
from treegen.cli.terminal.flags import rename_arguments
from treegen.errors import InputError, Message, RunError, arg
from treegen.evals.pipeline.listener import Listener, interruptible
from treegen.evals.registry import get_task_name
from treegen.llm import LLM
from treegen.runs import RunDir
from treegen.tasks.gsm8k import GSM8K

# As SMALL of the commands' tests.
CHOICES: dict[str, Any] = {
    "num_samples": 3,
    "limit": 4,
    "max_tokens": 12,
    "seed": 3,
    "num_fewshot": 1,
    "temperature": 0.8,
    "progress": False,
}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny)) as loaded:
        yield loaded


def drawn(path: Path) -> dict[tuple[str, int], str]:
    with RunDir.open(path) as run:
        return {(r["problem_id"], r["sample_index"]): r["text"] for r in run.records()}


def test_a_run_is_that_of_the_command(
    llm: LLM, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cli_cases import run_command

    given = ["-n", "3", "--limit", "4", "--max-tokens", "12", "--seed", "3", "-f", "1"]
    given += ["--temperature", "0.8", "-o", str(tmp_path / "typed"), "--quiet"]
    assert run_command("eval", "gsm8k", "-M", tiny, *given) == 0
    run = evaluate("gsm8k", llm, output=tmp_path / "called", **CHOICES)
    by_name = evaluate("gsm8k", tiny, output=tmp_path / "named", **CHOICES)
    typed = treegen.open_run(tmp_path / "typed")
    assert drawn(run.path) == drawn(by_name.path) == drawn(tmp_path / "typed")
    assert run.view.info.fingerprint == typed.view.info.fingerprint
    assert run.metrics().equals(typed.metrics())
    assert run.samples()["text"].tolist() == typed.samples()["text"].tolist()
    assert run.results["done"] == 12 and run.accuracy == typed.accuracy
    what = f"Run({str(run.path)!r}): gsm8k with {tiny.name}, 12 of 12 samples, accuracy "
    assert repr(run).startswith(what) and "maj@3" in repr(run) and "pass@3" in repr(run)


def test_it_shows_in_a_notebook_and_in_a_terminal(llm: LLM) -> None:
    run = evaluate("gsm8k", llm, **CHOICES)
    page = run._repr_html_()
    assert page.count("<table>") == page.count("</table>") == len(run.tables()) > 1
    assert "exact_match" in page and "maj@3" in page and "Prompt tokens computed" in page
    assert "|Task" in str(run) and "12 of 12 samples" in str(run)
    table = run.tables()[0]
    what = "gsm8k with tiny: n 3, temperature 0.8, max_tokens 12, 1-shot, seed 3"
    assert table.title == what and what in page and str(run).startswith(what)
    assert run.path.name == "gsm8k-tiny"
    assert "|Task" in str(table) and "<th" in table._repr_html_()
    assert run.report().read_text().startswith("<!doctype html>")
    other = evaluate("gsm8k", llm, **{**CHOICES, "seed": 4})
    compared = run.compare(other)
    assert "|Metric" in str(compared) and "<table>" in compared._repr_html_()
    assert compared.to_json() == run.compare(other.path).to_json()


def test_what_others_wrote_is_no_markup() -> None:
    from treegen.report.tables import PrintableTable

    shown = PrintableTable(["<b>"], [["<i>&"]], title="<u>", lines=["<s>"])._repr_html_()
    for tag in ("<i>", "<u>", "<s>"):
        assert tag not in shown
    assert "&lt;i&gt;&amp;" in shown


def test_a_temporary_run_goes_with_its_object(llm: LLM) -> None:
    run = evaluate("gsm8k", llm, **CHOICES)
    path = run.path
    assert path.is_dir()
    del run
    gc.collect()
    assert not path.exists()


def test_an_interrupted_run_stays_and_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from treegen.evals import sampling as draws

    whole = evaluate("gsm8k", llm, **CHOICES)
    look = draws._ProgressTracker.report
    looks = 0

    def pressed(self: Any, *, last: bool) -> Any:
        nonlocal looks
        looks += 1
        if looks == 12:
            signal.raise_signal(signal.SIGINT)
        return look(self, last=last)

    monkeypatch.setattr(draws._ProgressTracker, "report", pressed)
    with pytest.raises(KeyboardInterrupt) as stopped:
        evaluate("gsm8k", llm, **{**CHOICES, "max_tokens": 20})
    monkeypatch.undo()
    (note,) = stopped.value.__notes__
    assert " of 12 samples are stored; continue with resume='" in note
    path = Path(note.partition("resume='")[2].removesuffix("'"))
    done = len(drawn(path))
    assert 0 <= done < 12
    resumed = evaluate(model=llm, resume=path, progress=False)
    again = evaluate("gsm8k", llm, **{**CHOICES, "max_tokens": 20})
    assert drawn(resumed.path) == drawn(again.path) != drawn(whole.path)


def test_resume_begins_or_continues(llm: LLM, tmp_path: Path) -> None:
    place = tmp_path / "run"
    first = evaluate("gsm8k", llm, output=place, resume=True, **CHOICES)
    again = evaluate("gsm8k", llm, output=place, resume=True, **CHOICES)
    assert drawn(first.path) == drawn(again.path)
    with pytest.raises(RunError, match=rf"continue the run with resume='{place}'"):
        evaluate("gsm8k", llm, output=place, **CHOICES)
    with pytest.raises(RunError, match=r"temperature: 0.8 -> 0.5 \(temperature=\)"):
        evaluate("gsm8k", llm, resume=place, **{**CHOICES, "temperature": 0.5})


class OwnTask(GSM8K):
    """A task that no file outside of this test names."""

    name = "own"


def test_a_task_may_be_an_object_or_a_class(llm: LLM) -> None:
    class Local(OwnTask):
        name = "local"

    tasks: list[Any] = [OwnTask(), OwnTask, Local()]
    for task in tasks:
        run = evaluate(task, llm, **CHOICES)
        assert run.view.task == task.name and run.accuracy is not None
        assert not run.view.notices
    assert run.view.info.free["task"].startswith("test_a_task_may_be")
    assert get_task_name(OwnTask()) == f"{Path(__file__).resolve()}:OwnTask"
    assert get_task_name(GSM8K()) == get_task_name("gsm8k") == "gsm8k"


def test_searches_too(llm: LLM) -> None:
    choices: dict[str, Any] = {"limit": 2, "budget": {"tokens": 60}, "progress": False}
    run = search_task("countdown", llm, method="sample", **choices)
    assert run.view.searched and set(run.nodes()["problem_id"]) == set(run.view.info.problem_ids)
    again = search_task("countdown", llm, method="beam", width=2, expand=2, **choices)
    assert "solved" in str(run.compare(again))
    with pytest.raises(InputError, match="width= has no effect on best-of-n"):
        search_task("countdown", llm, method="best-of-n", width=2, **choices)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 3}, r"no setting 'max_new_tokens'; did you mean max_tokens=\?"),
        ({"num_sample": 3}, r"no setting 'num_sample'; did you mean num_samples="),
        ({"num_samples": 0}, "^num_samples must be at least 1, got 0"),
        ({"memory": "2GiB"}, "memory= has no effect on a model that is already loaded"),
        ({"stop_batch": 3}, "stop_batch= has no effect without stop_when="),
        ({"reasoning": "on"}, "also pass apply_chat_template=True"),
        ({"score": False, "stop_when": "decided"}, "cannot be used together with score=False"),
        ({"num_workers": 2}, "num_workers= has no effect without allow_code_execution=True"),
        ({"allow_code_execution": True, "sandbox": "x"}, "sandbox must be one of auto"),
        (
            {"allow_code_execution": True, "num_workers": 2},
            "num_workers= has no effect, because gsm8k",
        ),
        ({"task_args": {"length": 5}}, "task 'gsm8k' has no argument 'length'"),
    ],
)
def test_messages_name_arguments(llm: LLM, given: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        evaluate("gsm8k", llm, progress=False, **given)


def test_what_is_no_model_or_task_is_refused() -> None:
    with pytest.raises(InputError, match="model must be a name, an LLM or a Cluster, got int"):
        evaluate("gsm8k", 7)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no task is given"):
        evaluate(progress=False)
    with pytest.raises(InputError, match="resume= requires a run directory"):
        evaluate("gsm8k", resume=True)


@pytest.mark.parametrize(
    ("message", "python", "typed"),
    [
        (
            f"continue with {arg('resume', 'runs/a b')}",
            "continue with resume='runs/a b'",
            "continue with --resume 'runs/a b'",
        ),
        (
            f"{arg('temperature')} must be a number",
            "temperature must be a number",
            "--temperature must be a number",
        ),
        (
            f"{arg('num_samples')} must be at least 1",
            "num_samples must be at least 1",
            "--n-samples must be at least 1",
        ),
        (
            f"also pass {arg('apply_chat_template', True)}",
            "also pass apply_chat_template=True",
            "also pass --apply-chat-template",
        ),
        (
            f"cannot go with {arg('score', False)}",
            "cannot go with score=False",
            "cannot go with --no-score",
        ),
        (f"lower {arg('page_size', 16)}", "lower page_size=16", "lower --model-args page_size=16"),
        (f"({arg('stop_token_ids=')})", "(stop_token_ids=)", "(--gen-kwargs stop_token_ids)"),
        (f"{arg('model', 'demo')} is small", "model='demo' is small", "--model demo is small"),
        (f"task.name: ({arg('task=')})", "task.name: (task=)", "task.name: (TASK)"),
        (
            f"{arg('width')} must be at least 1",
            "width must be at least 1",
            "width must be at least 1",
        ),
        *(
            (text, text, text)
            for text in (
                "the data must be JSON",
                "must be name=value, got 'data=5'",
                "/tmp/max_tokens/x.py is gone",
            )
        ),
    ],
)
def test_a_command_names_its_flags(message: str, python: str, typed: str) -> None:
    error = InputError(message)
    assert str(error) == python and rename_arguments(error.message, None) == python
    assert rename_arguments(error.message, eval_command) == typed


def test_each_command_has_flags_of_its_own() -> None:
    width = Message(f"{arg('width')} must be 1")
    assert rename_arguments(width, search_command) == "--width must be 1"
    assert rename_arguments(Message(arg("arguments=")), search_command) == "--method-arg"


def test_an_error_carries_the_name_of_its_parameter() -> None:
    with pytest.raises(InputError) as raised:
        evaluate("gsm8k", num_samples=0)
    error = pickle.loads(pickle.dumps(raised.value))
    assert error.parameter == "num_samples" and str(error) == str(raised.value)
    nested = InputError(f"the call failed: {error.message.marked}")
    assert nested.parameter == "num_samples"
    assert rename_arguments(nested.message, eval_command).startswith(
        "the call failed: --n-samples must be"
    )
    assert InputError("there is no such file").parameter is None


def test_ctrl_c_is_told_once_and_raised_at_the_end() -> None:
    before = signal.getsignal(signal.SIGINT)
    reached = False
    with pytest.raises(KeyboardInterrupt), interruptible() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        reached = bool(stop())
    assert reached and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), interruptible():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one interrupts at once")
    found: list[object] = []

    def elsewhere() -> None:
        with interruptible() as stop:
            found.append(stop())

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [False]


def test_names_of_other_tools_are_answered(llm: LLM, tiny: Path) -> None:
    with pytest.raises(InputError, match=r"gpu_memory_utilization.*; did you mean memory="):
        LLM(str(tiny), gpu_memory_utilization=0.9)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="has no 'max_new_tokens'; did you mean max_tokens="):
        llm.generate(["x"], {"max_new_tokens": 3})
    with pytest.raises(InputError, match="params must be a list"):
        llm.generate(["x"], 3)  # type: ignore[arg-type]
    assert llm.get_tokenizer() is llm.tokenizer
    (by_dict,) = llm.generate(["x"], {"max_tokens": 4, "seed": 1, "n": 2})
    (by_params,) = llm.generate(["x"], treegen.SamplingParams(max_tokens=4, seed=1, n=2))
    assert by_dict == by_params and by_dict[0].token_ids == by_dict[0].tokens


def test_chat_takes_one_conversation_or_several(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template, raising=False)
    hi, ho = ([{"role": "user", "content": word}] for word in ("hi", "ho"))
    params = {"max_tokens": 4, "seed": 0}
    assert llm.chat(hi, params) == llm.generate([hi], params)
    assert llm.chat([hi, ho], params) == llm.generate([hi, ho], params)
    assert llm.chat([], params) == []


def test_the_package_shows_public_names_only() -> None:
    assert dir(treegen) == sorted(treegen.__all__)
    assert {"evaluate", "search_task", "Run", "LLM"} <= set(dir(treegen))


def test_a_listener_hears_nothing_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    listener = Listener()
    listener.warn("a")
    listener.loading("b")
    listener.show_prompt("c")
    listener.track(iter(()), "d")
    assert capfd.readouterr() == ("", "") and "resume='x'" in listener.resume_command("x", [])


def test_importing_the_calls_needs_no_torch() -> None:
    import subprocess

    code = "import sys, treegen; treegen.evaluate; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert Run.__mro__[1].__name__ == "Frames"


def test_a_method_that_is_a_function_is_named_by_its_file() -> None:
    async def follow(root: object) -> None: ...

    with pytest.raises(InputError, match=r"method must be text, .*'path/to/file\.py:follow'"):
        search_task("countdown", method=follow, limit=1)  # type: ignore[arg-type]
