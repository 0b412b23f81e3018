"""The programs of examples/peers, on their smallest jobs."""

import json
import re
import runpy
import shlex
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging


@pytest.fixture
def workload(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(repository / "examples" / "peers"))
    import workload

    return workload


Run = Callable[..., list[list[str]]]


@pytest.fixture
def run_program(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """A function that runs a program and returns the cells of its tables, one a job."""

    def run(line: str, folder: Path) -> list[list[str]]:
        name, jobs, *options = line.split()
        script = str(repository / "examples" / "peers" / name)
        timing = ("--dtype", "float32", "--repeats", "1", "--warm-ups", "0")
        monkeypatch.setattr(sys, "argv", [script, jobs, str(folder), *timing, *options])
        capsys.readouterr()
        verbosity = logging.get_verbosity()
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            logging.set_verbosity(verbosity)
        out = capsys.readouterr().out
        lines = [line for line in out.splitlines() if line.startswith("|")]
        assert lines[::3] == lines[:1] * (len(lines) // 3)
        assert [cell.strip() for cell in lines[0].split("|")][1:4] == ["job", "engine", "tokens/s"]
        assert {"settings", "machine", "command", "date"} <= {
            line.split(":")[0] for line in out.split("\n")
        }
        return [[cell.strip() for cell in row.split("|")][1:-1] for row in lines[2::3]]

    return run


@pytest.mark.parametrize(("job", "tokens"), [("tiny", 24), ("search-cpu", 2560)])
def test_runners_draw_the_same_numbers_of_tokens(
    job: str, tokens: int, workload: Any, run_program: Run, tmp_path: Path
) -> None:
    workload.save_checkpoint("tiny", tmp_path, weights=True, dtype="float32")
    engines = [f"run_treegen.py {job}", f"run_transformers.py {job}"]
    # Older versions of transformers call a page a block, and lose samples on a CPU.
    if job == "tiny" and hasattr(ContinuousBatchingConfig(), "page_size"):
        engines.append(f"run_transformers.py {job} --continuous")
    for line in engines:
        (cells,) = run_program(line, tmp_path)
        assert cells[0] == job
        assert cells[6] == f"{tokens:,}"


def test_treegen_scores_and_keeps_a_structure(
    workload: Any, run_program: Run, tmp_path: Path
) -> None:
    workload.save_checkpoint("tiny", tmp_path, weights=False, dtype="float32")
    rows = run_program("run_treegen.py score-cpu,structured-cpu", tmp_path)
    assert [cells[6] for cells in rows] == ["256", "320"]
    job = workload.job_of("structured-cpu")
    text = '{"answer": "%s", "score": 1234}' % ("a" * (job.new_tokens - 29))
    assert re.fullmatch(job.pattern, text) and len(text) == job.new_tokens


@pytest.mark.parametrize("job", ["mla-cpu", "hybrid-cpu", "experts-cpu"])
def test_treegen_makes_up_weights_where_a_checkpoint_has_none(
    job: str, workload: Any, run_program: Run, tmp_path: Path
) -> None:
    shape = workload.job_of(job).shape
    workload.save_checkpoint(shape, tmp_path, weights=False, dtype="float32")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"][0].endswith("ForCausalLM")
    assert not workload.has_weights(tmp_path)
    (cells,) = run_program(f"run_treegen.py {job}", tmp_path)
    assert cells[6] == f"{4 * 16 * 16:,}"


def test_jobs_of_one_shape_share_an_engine(workload: Any, run_program: Run, tmp_path: Path) -> None:
    workload.save_checkpoint("tiny", tmp_path, weights=False, dtype="float32")
    rows = run_program("run_treegen.py tiny,search-cpu", tmp_path)
    assert [(cells[0], cells[6]) for cells in rows] == [("tiny", "24"), ("search-cpu", "2,560")]
    with pytest.raises(SystemExit, match="tiny has tiny, mla-cpu has tiny-mla"):
        workload.jobs_of("tiny,mla-cpu")
    with pytest.raises(SystemExit, match="does not support the jobs score-cpu"):
        workload.jobs_of("tiny,score-cpu", kinds=("draw",))
    jobs = workload.jobs_of("tiny,judged-cpu")
    assert workload.find_max_sizes(jobs) == (16 * 4, 96 + 64 + 32 + 16)


def _scored(tokens: list[int]) -> SimpleNamespace:
    """Return what vLLM reports for a prompt: nothing predicts its first token."""
    numbers = [{token: SimpleNamespace(logprob=-1.0)} for token in tokens]
    return SimpleNamespace(prompt_logprobs=[None, *numbers[1:]])


def test_vllm_gets_room_and_graphs_for_the_largest_of_its_jobs(
    workload: Any, run_program: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for vLLM draws as many tokens as it is asked for."""
    engine_options: dict[str, Any] = {}

    class LLM:
        def __init__(self, **settings: Any) -> None:
            engine_options.update(settings)

        def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
            longest = max(len(prompt["prompt_token_ids"]) for prompt in prompts)
            assert longest + params.max_tokens < engine_options["max_model_len"]
            if hasattr(params, "prompt_logprobs"):
                return [_scored(prompt["prompt_token_ids"]) for prompt in prompts]
            assert params.temperature == 1.0
            assert hasattr(params, "ignore_eos") != hasattr(params, "structured_outputs")
            drawn = [SimpleNamespace(token_ids=[7] * params.max_tokens) for _ in range(params.n)]
            return [SimpleNamespace(outputs=drawn) for _ in prompts]

    vllm: Any = ModuleType("vllm")
    vllm.LLM, vllm.SamplingParams = LLM, SimpleNamespace
    params: Any = ModuleType("vllm.sampling_params")
    params.StructuredOutputsParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.setattr(workload, "versions_of", lambda *names: dict.fromkeys(names, "0"))
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    workload.save_checkpoint("tiny", tmp_path, weights=False, dtype="float32")
    rows = run_program("run_vllm.py tiny,search-cpu,monkeys-cpu", tmp_path)
    assert [cells[6] for cells in rows] == ["24", "2,560", "32,768"]
    assert engine_options["max_num_seqs"] == engine_options["max_cudagraph_capture_size"] == 1024
    assert engine_options["max_model_len"] == 192 + 64 + 3 * 16 + 1
    assert engine_options["load_format"] == "dummy"
    run_program("run_vllm.py tiny --graph-rows 4", tmp_path)
    assert (engine_options["max_num_seqs"], engine_options["max_cudagraph_capture_size"]) == (6, 4)
    assert engine_options["skip_tokenizer_init"] and engine_options["disable_cascade_attn"]
    assert engine_options["async_scheduling"] and "attention_backend" not in engine_options
    options = "--cascade --no-async --attention FLASHINFER --tokens 3"
    (cells,) = run_program(f"run_vllm.py tiny {options}", tmp_path)
    assert cells[6] == "18"
    assert (engine_options["disable_cascade_attn"], engine_options["async_scheduling"]) == (
        False,
        False,
    )
    assert engine_options["attention_backend"] == "FLASHINFER"
    rows = run_program("run_vllm.py score-cpu,structured-cpu", tmp_path)
    assert [cells[6] for cells in rows] == ["256", "320"]
    assert not engine_options["skip_tokenizer_init"]


def test_a_warm_up_may_be_short_and_is_not_timed(
    workload: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options = workload.arguments().parse_args(
        ["tiny", "DIR", "--warm-ups", "2", "--warm-up-tokens", "3", "--repeats", "1"]
    )
    runs = []

    def run(job: Any, number: int) -> int:
        runs.append((number, job.new_tokens))
        return 24

    workload.measure("engine", {}, {}, [workload.job_of("tiny")], options, run)
    assert runs == [(-2, 3), (-1, 3), (0, 4)]
    assert "of 1 " in capsys.readouterr().out


def test_prompts_depend_on_the_run_and_share_what_their_job_says(workload: Any) -> None:
    job = workload.job_of("judged-cpu")
    prompts = job.prompts(0)
    assert prompts == job.prompts(0)
    assert len(prompts) == job.num_problems == 16
    assert {len(prompt) for prompt in prompts} == {96 + 64 + 32}
    assert [len({tuple(p[:end]) for p in prompts}) for end in (96, 160, 192)] == [1, 4, 16]
    assert not {tuple(p[:96]) for p in prompts} & {tuple(p[:96]) for p in job.prompts(1)}


def test_every_job_has_a_shape_that_transformers_knows(workload: Any) -> None:
    for name in workload.JOBS["jobs"]:
        job = workload.job_of(name)
        config = workload.config_of(job.shape)
        assert config.vocab_size == job.vocab_size
        assert job.longest <= config.max_position_embeddings


def test_an_unknown_job_is_named(workload: Any) -> None:
    with pytest.raises(SystemExit, match=r"JOB must be one of gsm8k, .*, got 'chess'"):
        workload.job_of("chess")


PLAN = [
    {
        "name": "both",
        "engine": "treegen",
        "seconds": 200,
        "command": "run_treegen.py tiny,structured-cpu --dtype float32 --repeats 1 --warm-ups 0",
    },
    {
        "name": "slow",
        "engine": "treegen",
        "seconds": 0.2,
        "command": "run_treegen.py apps-cpu --dtype float32",
    },
    {"name": "absent", "engine": "vllm", "seconds": 9, "command": "run_vllm.py tiny"},
]


def _run_plan(repository: Path, plan: Path, out: Path, *options: str) -> str:
    script = repository / "examples" / "peers" / "run_all.py"
    command = [sys.executable, str(script), str(plan), str(out), "--engine", f"vllm={out / 'no'}"]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.soak
def test_a_plan_runs_its_programs_and_continues_where_it_stopped(
    repository: Path, tmp_path: Path
) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    plan.write_text(json.dumps(PLAN))
    done = _run_plan(repository, plan, out)
    assert "both: done" in done and "slow: killed" in done
    assert "absent: not run, vllm is not installed" in done
    again = _run_plan(repository, plan, out, "--minutes", "0", "--programs", "both,slow")
    assert "both" not in again and "slow: not run" in again
    table = (out / "table.md").read_text().splitlines()
    assert [row.split(" | ")[:2] for row in table[2:]] == [
        ["| tiny", "treegen"],
        ["| structured-cpu", "treegen"],
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "a/b"}, "must have letters"),
        ({"command": "../x.py tiny"}, "is not a program of"),
        ({"command": "run_vllm.py unknown"}, "JOB must be one of"),
        ({"command": ""}, "is not a plan"),
        ({"limit": 1}, "is not a plan"),
        ({"seconds": "9"}, "seconds must be a number"),
    ],
)
def test_a_mistake_in_a_plan_ends_the_program(
    change: dict[str, Any], message: str, workload: Any, tmp_path: Path
) -> None:
    from run_all import read_plan

    (tmp_path / "plan.json").write_text(json.dumps([PLAN[2] | change]))
    with pytest.raises(SystemExit, match=message):
        read_plan(tmp_path / "plan.json")


def test_the_published_plan_uses_options_that_the_programs_have(
    repository: Path, workload: Any
) -> None:
    from run_all import read_plan

    folder = repository / "examples" / "peers"
    shared = (folder / "workload.py").read_text()
    for program in read_plan(folder / "plan.json"):
        script, _, *options = shlex.split(program.command)
        known = shared + (folder / script).read_text()
        assert all(f'"{option}"' in known for option in options if option.startswith("--"))
        assert {workload.job_of(job).shape for job in program.jobs} == {program.shape}


def _library(entries: list[tuple[int, int, bytes]]) -> bytes:
    """Return a 64-bit ELF file with a container of (kind, capability, code) after some padding."""
    body = b"".join(
        struct.pack("<HHIQ12xI", kind, 0, 32, len(code), arch) + code
        for kind, arch, code in entries
    )
    names = b"\0.names\0.nv_fatbin\0"
    fatbin = bytes(8) + struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
    start = 64 + len(names)
    headers = [(0, 0, 0), (1, 64, len(names)), (8, start, len(fatbin))]
    table = b"".join(
        struct.pack("<IIQQQQ24x", name, 1, 0, 0, offset, size) for name, offset, size in headers
    )
    head = struct.pack("<5s35xQ10xHHH", b"\x7fELF\x02", start + len(fatbin), 64, 3, 1)
    return head + names + fatbin + table


def test_code_for_other_gpus_is_zeroed_in_place(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = [(2, 80, b"a" * 24), (2, 90, b"b" * 40), (1, 90, b"c" * 8), (2, 100, b"d" * 16)]
    kept = [(kind, arch, x if (kind, arch) == (2, 90) else bytes(len(x))) for kind, arch, x in code]
    path, other = tmp_path / "a.so", tmp_path / "text.so"
    path.write_bytes(_library(code))
    other.write_text("no library")
    script = str(repository / "examples" / "peers" / "shrink_libraries.py")
    monkeypatch.setattr(sys, "argv", [script, "90", str(path)])
    runpy.run_path(script, run_name="__main__")
    assert path.read_bytes() == _library(kept)
    monkeypatch.setattr(sys, "argv", [script, "90", str(other)])
    with pytest.raises(SystemExit, match="is not a 64-bit shared library"):
        runpy.run_path(script, run_name="__main__")
    assert other.read_text() == "no library"


@pytest.fixture
def packer(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`pack_engine`, with an engine `tiny` whose wheel is in a folder `wheels`."""
    monkeypatch.syspath_prepend(str(repository / "examples" / "peers"))
    import pack_engine

    engine = pack_engine.Engine(
        shrink="tiny/*.so",
        remove="tiny/tests */data.*",
        patches=(pack_engine.optional("tiny/__init__.py", "    import other\n"),),
    )
    monkeypatch.setitem(pack_engine.ENGINES, "tiny", engine)
    monkeypatch.setattr(pack_engine, "HERE", tmp_path)
    monkeypatch.setattr(pack_engine, "run", lambda *command: None)  # strip needs real libraries
    monkeypatch.setattr("shutil.which", str)
    (tmp_path / "tiny.txt").write_text("Tiny_Engine==1.0\n")
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "tiny.whl", "w") as wheel:
        wheel.writestr("tiny/__init__.py", "if True:\n    import other\n")
        wheel.writestr("tiny/code.so", _library([(2, 80, b"a" * 24), (2, 90, b"b" * 40)]))
        wheel.writestr("tiny/data.json", "{}")
        wheel.writestr("tiny/tests/test_tiny.py", "")
        wheel.writestr("tiny_engine-1.0.data/scripts/tiny", "")
        wheel.writestr("tiny_engine-1.0.dist-info/METADATA", "Name: tiny-engine\nVersion: 1.0\n")
    return pack_engine


def _pack(packer: Any, monkeypatch: pytest.MonkeyPatch, folder: Path, engine: str = "tiny") -> None:
    """Run `pack_engine.py` on the wheels in a folder."""
    arguments = [engine, str(folder / "out.tar.xz"), "--wheels", str(folder / "wheels")]
    monkeypatch.setattr(sys, "argv", ["pack_engine.py", *arguments])
    packer.main()


def test_engines_are_packed_without_what_their_table_removes(
    packer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _pack(packer, monkeypatch, tmp_path)
    with tarfile.open(tmp_path / "out.tar.xz") as archive:
        archive.extractall(tmp_path / "out", filter="data")
        assert {*archive.getnames()} == {
            "tiny/__init__.py",
            "tiny/code.so",
            "tiny_engine-1.0.dist-info/METADATA",
        }
    runpy.run_path(str(tmp_path / "out" / "tiny" / "__init__.py"))
    library = (tmp_path / "out" / "tiny" / "code.so").read_bytes()
    assert library == _library([(2, 80, bytes(24)), (2, 90, b"b" * 40)])
    assert "remove tiny/tests: 1 files" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.tar.xz", "tiny.txt", "wheels"}


@pytest.mark.parametrize(
    ("engine", "change", "message"),
    [
        ("chess", {}, "ENGINE must be one of vllm, sglang, flashinfer, tiny, got 'chess'"),
        ("tiny", {"tiny.txt": "tiny-engine==1.1"}, "the wheels lack tiny.txt: .*==1.1"),
        ("tiny", {"tiny.txt": ""}, "the wheels exceed tiny.txt: .*tiny-engine==1.0"),
        ("tiny", {"which": None}, "strip is missing; install binutils"),
        ("tiny", {"out.tar.xz": ""}, "out.tar.xz must be a new file"),
        (
            "tiny",
            {"patches": (("tiny/none.py", "a", "b"),)},
            "tiny/none.py must contain once .*'a'",
        ),
        ("tiny", {"remove": "tiny/absent*"}, r"nothing matches tiny/absent\*"),
    ],
    ids=["engine", "version", "surplus", "program", "out", "patch", "glob"],
)
def test_what_cannot_be_packed_gives_one_line(
    packer: Any,
    engine: str,
    change: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in change.items():
        if "." in name:
            (tmp_path / name).write_text(value)
        elif name == "which":
            monkeypatch.setattr("shutil.which", lambda program: None)
        else:
            changed = replace(packer.ENGINES["tiny"], **{name: value})
            monkeypatch.setitem(packer.ENGINES, "tiny", changed)
    before = {*tmp_path.iterdir()}
    with pytest.raises(SystemExit) as failure:
        _pack(packer, monkeypatch, tmp_path, engine)
    assert failure.value.code == 2
    assert re.fullmatch(rf"pack_engine.py: .*{message}.*\n", capsys.readouterr().err)
    assert {*tmp_path.iterdir()} == before


@pytest.mark.skipif(not (shutil.which("c++filt") and shutil.which("zstd")), reason="needs both")
def test_only_attention_of_the_jobs_stays(packer: Any) -> None:
    name = (
        "_ZN5flash25CollectiveMainloopFwdSm90ILi2EN4cute5tupleIJNS1_1CILi1EEEEEENS2_IJNS3_ILi192EEE"
        "NS3_ILi{}EEEEEELi{}EN7cutlass{}EfNS9_4arch4Sm90ELb1ELb0ELb{}ELb0EE3runEv"
    )
    kept = [name.format(64, 64, "10bfloat16_t", 0), "_ZN5flash7combineEv"]
    others = [
        name.format(64, 64, "10bfloat16_t", 1),
        name.format(64, 64, "6half_t", 0),
        name.format(96, 96, "10bfloat16_t", 0),
        name.format(192, 128, "10bfloat16_t", 0),
    ]
    codes = [text.encode() for text in kept + others]
    codes += [packer.pipe(code, "zstd", "-c") + bytes(3) for code in (codes[0], codes[2])]
    zeroed = {2, 3, 4, 5, 7}
    data = bytearray(_library([(2, 90, code) for code in codes]))
    assert packer.keep_attention(data) == sum(len(codes[i]) for i in zeroed)
    codes = [bytes(len(code)) if i in zeroed else code for i, code in enumerate(codes)]
    assert data == _library([(2, 90, code) for code in codes])
