"""What `treegen bench` measures with: workloads, rooflines, modes. No test looks at a time."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers_baseline import GENERATE, TransformersBench

from treegen import LLM, Node, SamplingParams
from treegen.bench import attention, ceilings
from treegen.bench.decode import Settings, WorkloadResult, no_attention
from treegen.bench.prefill import PassTime, pass_table
from treegen.bench.roofline import (
    ExpertSize,
    LevelWork,
    ModelSize,
    levels_of,
    size_of,
    state_bytes,
    step_floor,
)
from treegen.bench.shapes import SHAPES, build_model, byte_tokenizer, shape_of
from treegen.bench.table import results_table
from treegen.bench.timing import PassTimer, Spread, Stopwatch, time_sustained
from treegen.bench.workloads import (
    DECODE_MODES,
    NO_ATTENTION,
    SHARING_MODES,
    Case,
    Workload,
    decode_cases,
)
from treegen.common.spec import LayerSpec
from treegen.errors import CapacityError, InputError
from treegen.model.linear.fp8 import Fp8Linear
from treegen.model.load import from_module
from treegen.model.model import Model
from treegen.ops.attention import Level, attend
from treegen.ops.attention.registry import LOADERS, choose
from treegen.prompts.plan.cost_model import Sharing
from treegen.prompts.tree import prompts_of

CPU = torch.device("cpu")
CEILINGS = ceilings.Ceilings("float32", 2e9, 1e9, 4e8, "flash")


@pytest.fixture(scope="module")
def tiny_model() -> tuple[Model, Any]:
    """A tiny model in memory, and its tokenizer."""
    return build_model(SHAPES["tiny"], device="cpu")


# Models


def test_a_shape_has_the_weights_that_it_says(tiny_model: tuple[Model, Any]) -> None:
    model, _ = tiny_model
    matrices = {id(p): p.numel() for p in model.module.parameters() if p.dim() > 1}
    assert sum(matrices.values()) == SHAPES["tiny"].num_weights
    # What the models are called after.
    published = {
        "llama2-7b": 6.74,
        "llama3-8b": 8.03,
        "llama3.2-1b": 1.24,
        "qwen3-4b": 4.02,
        "yi-6b": 6.06,
        "codellama-13b": 13.0,
        "qwen3.6-35b-a3b": 34.66,
    }
    for name, billions in published.items():
        assert SHAPES[name].num_weights / 1e9 == pytest.approx(billions, rel=5e-3)
    with pytest.raises(InputError, match="llama3-8b"):
        shape_of("llama-8b")


def test_weights_that_do_not_fit_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treegen.bench.timing.free_bytes", lambda device: 2**30)
    with pytest.raises(CapacityError, match=r"llama2-7b need 25\.1 GiB"):
        build_model(SHAPES["llama2-7b"], device="cpu")


def test_an_llm_of_a_loaded_model(tiny_model: tuple[Model, Any]) -> None:
    model, tokenizer = tiny_model
    tree = Node("Ann has ", children=[Node("3.", samples=2), Node("4 pens.", samples=2)])
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first = LLM(model, tokenizer=tokenizer, memory="1MiB").run(tree, params)
    # The model serves one LLM after another.
    again = LLM(model, tokenizer=tokenizer, memory="2MiB", sharing="off").run(tree, params)
    assert [c.tokens for c in first.completions] == [c.tokens for c in again.completions]
    with pytest.raises(InputError, match="tokenizer"):
        LLM(model)
    with pytest.raises(InputError, match="tokenizer"):
        LLM("somewhere", tokenizer=tokenizer)


def test_a_module_in_a_dtype_that_is_not_supported_is_refused() -> None:
    module = build_model(SHAPES["tiny"], device="cpu")[0].module.double()
    with pytest.raises(InputError, match="float64"):
        from_module(module)


@pytest.mark.parametrize("quantization", ["fp8", "mxfp4", "nvfp4"])
def test_a_shape_on_several_gpus_is_not_quantized(quantization: str) -> None:
    with pytest.raises(InputError, match=f"quantization {quantization} is not supported"):
        build_model(SHAPES["tiny"], device="cpu", ranks=2, quantization=quantization)


@pytest.mark.parametrize("name", ["tiny", "tiny-delta", "tiny-mamba2"])
def test_a_shape_is_made_in_fp8(name: str) -> None:
    model, _ = build_model(SHAPES[name], device="cpu", quantization="fp8")
    matrices = [part for part in model.module.modules() if isinstance(part, Fp8Linear)]
    assert matrices and not any(weight.is_meta for weight in model.module.parameters())


# Workloads


@pytest.mark.parametrize("problem_tokens", [0, 3])
@pytest.mark.parametrize("prefixes", [1, 3])
def test_a_workload_is_a_tree_of_its_lengths(prefixes: int, problem_tokens: int) -> None:
    problems = 5 if problem_tokens else 1
    workload = Workload(
        "w",
        prefix=7,
        problems=problems,
        problem_tokens=problem_tokens,
        samples=4,
        new_tokens=9,
        prefixes=prefixes,
    )
    tokenizer = byte_tokenizer()
    prompts = prompts_of(workload.tree(tokenizer, len(tokenizer)))
    assert sum(prompt.samples for prompt in prompts) == workload.rows == prefixes * problems * 4
    tokens = [[t for node in prompt.path for t in node.content] for prompt in prompts]
    assert {len(each) for each in tokens} == {workload.prompt_tokens}
    firsts = {(each[0], each[7] if problem_tokens else 0) for each in tokens}
    assert len(firsts) == len(prompts)
    for rows in (1, 4, 5, workload.rows, workload.rows + 1):
        first = workload.first(rows, 2)
        assert min(rows, workload.rows) <= first.rows <= workload.rows
        assert first.rows < rows + 4 and first.new_tokens == 2


def test_a_scaled_workload_keeps_what_is_shared_by_how_many() -> None:
    whole = Workload("w", prefix=1000, problems=120, problem_tokens=50, samples=128, new_tokens=512)
    part = whole.scale(0.1, 1.0)
    assert (part.problems, part.samples, part.prefix, part.new_tokens) == (12, 128, 1000, 512)
    short = whole.scale(0.001, 0.01)
    assert (short.problems, short.prefix, short.problem_tokens, short.new_tokens) == (1, 10, 1, 6)
    many = Workload(
        "m", prefix=9, problems=246, problem_tokens=5, samples=1, new_tokens=1, prefixes=57
    )
    assert many.scale(0.1, 1.0).rows == pytest.approx(many.rows * 0.1, rel=0.02)
    with pytest.raises(InputError, match="samples must be at least 1"):
        Workload("w", prefix=1, samples=0, new_tokens=1)
    with pytest.raises(InputError, match="problem_tokens must be at least 1, got 0"):
        Workload("w", prefix=1, problems=2, samples=1, new_tokens=1)


def test_rows_stored_are_those_whose_pages_fit() -> None:
    rng = random.Random(0)
    for _ in range(200):
        workload = Workload(
            "w",
            prefix=rng.randint(1, 90),
            problems=rng.randint(1, 6),
            problem_tokens=rng.randint(1, 40),
            samples=rng.randint(1, 9),
            new_tokens=rng.randint(1, 50),
        )
        page, pool = rng.choice([1, 4, 16]), rng.randint(1, 200)

        def pages(rows: int, sharing: str, workload: Workload = workload, page: int = page) -> int:
            whole, some = workload.prefix, workload.problem_tokens
            by_all, by_some = {"off": (0, 0), "one": (whole, 0), "all": (whole, some)}[sharing]
            own = whole + some - by_all - by_some + workload.new_tokens
            problems = -(-rows // workload.samples)
            return -(-by_all // page) + problems * -(-by_some // page) + rows * -(-own // page)

        modes: tuple[Sharing, ...] = ("off", "one", "all")
        for sharing in modes:
            rows = workload.rows_stored(sharing, pool, page)
            assert rows == 0 or pages(rows, sharing) <= pool
            assert pages(rows + 1, sharing) > pool


# Rooflines


def test_the_floor_of_a_step_is_the_sum_of_what_its_parts_take_at_least() -> None:
    size = ModelSize(
        layer_weights=1000,
        hidden=10,
        vocab_size=50,
        q_heads=4,
        layers=(LayerSpec(2, 8, 8), LayerSpec(2, 8, 8)),
        itemsize=2,
    )
    levels = [LevelWork("level 0", 30 * 100, 100), LevelWork("own keys", 30 * 7, 30 * 7)]
    floor = step_floor(size, CEILINGS, 30, levels)
    assert floor.parts == pytest.approx(
        {
            "layers": 2 * 30 * 1000 / 2e9,
            "level 0": 2 * (2 * 3000 * 4 * 16) / 1e9,
            "own keys": 2 * (210 * 2 * 16 * 2) / 4e8,
            "head": 2 * 30 * 10 * 50 / 2e9,
            "sampling": 30 * 50 * 2 / 4e8,
        }
    )
    assert floor.seconds == pytest.approx(sum(floor.parts.values()))
    one = step_floor(size, CEILINGS, 1, [])
    assert one.parts["layers"] == pytest.approx(1000 * 2 / 4e8)  # the weights have to be read
    assert set(one.parts) == {"layers", "head", "sampling"}
    prefill = step_floor(size, CEILINGS, 30, levels, drawn=1)
    for name, seconds in prefill.parts.items():
        same = one if name in ("head", "sampling") else floor
        assert seconds == same.parts[name]


def test_a_pass_without_a_roofline_says_why() -> None:
    known = PassTime(8, 40, 3, Spread(2.0, 1.0, 4.0), 0.5)
    windows = replace(known, floor_ms=None, note="no roofline: windows")
    table = pass_table([known, windows, windows])
    assert [tuple(row[-2:]) for row in table.rows] == [("0.50", "4.00"), ("", ""), ("", "")]
    assert table.lines == ("no roofline: windows",)


@pytest.mark.parametrize("sharing", SHARING_MODES)
def test_the_roofline_counts_the_keys_that_the_engine_reads(
    sharing: Any, tiny_model: tuple[Model, Any]
) -> None:
    model, tokenizer = tiny_model
    rng = np.random.default_rng(1)
    leaves = [
        Node(rng.integers(2, 200, length).tolist(), samples=samples)
        for length, samples in ((5, 3), (40, 1), (17, 6))
    ]
    tree = Node(rng.integers(2, 200, 37).tolist(), children=leaves, samples=2)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    result = LLM(model, tokenizer=tokenizer, memory="1MiB", sharing=sharing).run(tree, params)
    levels = levels_of(result.plan, result.plan.num_rows, params.max_tokens / 2)
    assert result.usage.decode_steps == 8
    assert sum(level.keys for level in levels) * 8 == result.usage.key_tokens_read
    # Every row meets its whole context, whoever reads it.
    assert sum(level.pairs for level in levels) * 8 == result.usage.key_tokens_unshared
    half = levels_of(result.plan, 6, 0)
    assert sum(level.pairs for level in half) < sum(level.pairs for level in levels)


def test_sizes_of_a_model(tiny_model: tuple[Model, Any]) -> None:
    model, _ = tiny_model
    size = size_of(model)
    assert isinstance(size, ModelSize)
    shape = SHAPES["tiny"]
    matrices = size.layer_weights + 2 * size.hidden * size.vocab_size
    assert matrices == shape.num_weights
    assert (size.q_heads, size.itemsize, len(size.layers)) == (shape.q_heads, 4, shape.layers)


def test_experts_and_states_are_in_the_roofline() -> None:
    experts = ExpertSize(weights=100, num=8, per_row=2)
    assert experts.read(1) == pytest.approx(200) and experts.read(1000) == pytest.approx(800)
    model, tokenizer = build_model(SHAPES["tiny-delta"], device="cpu")
    size = size_of(model)
    assert isinstance(size, ModelSize) and size.experts is not None
    assert (size.experts.num, size.experts.per_row) == (4, 2)
    matrices = size.layer_weights + 2 * size.hidden * size.vocab_size
    assert matrices + 4 * size.experts.weights == SHAPES["tiny-delta"].num_weights
    tree = Node([5] * 9, samples=6)
    llm = LLM(model, tokenizer=tokenizer, memory="4MiB")
    plan, spec = llm.plan(tree, SamplingParams(max_tokens=8)), model.spec
    assert spec.delta is not None and spec.delta.shared_tokens(6) > 8
    windows = 3 * 2 * spec.states[0][0].num_bytes
    assert state_bytes(replace(spec, delta=None), plan, 4, 3.5) == 2 * 4 * spec.state_bytes
    # Three layers read the state of the prompt once, and each row the updates that it has.
    listed = state_bytes(spec, plan, 4, 3.5) - 4 * windows
    assert listed == 3 * (spec.delta.state_bytes + 4 * 3 * spec.delta.token_bytes)
    floor = step_floor(size, CEILINGS, 4, [], 4e8)
    assert floor.parts["states"] == pytest.approx(1.0)


def test_the_roofline_of_mamba2_counts_all_matrices() -> None:
    shape = SHAPES["tiny-mamba2"]
    model, _ = build_model(shape, device="cpu")
    size = size_of(model)
    assert isinstance(size, ModelSize) and size.experts is None
    assert size.layer_weights + size.hidden * size.vocab_size == shape.num_weights
    assert model.spec.delta is not None and not model.spec.delta.corrects
    assert len(model.spec.states) == 3 and len(model.spec.layers) == 1


def test_models_without_a_roofline_say_why() -> None:
    import tiny_models
    from transformers import AutoModelForCausalLM

    for family, why in (("mistral_swa", "sliding windows"), ("dbrx", "experts")):
        model_type, settings = tiny_models.EXACT[family]
        module = AutoModelForCausalLM.from_config(tiny_models.config_of(model_type, **settings))
        reason = size_of(from_module(module, check=False))
        assert isinstance(reason, str) and why in reason


# Attention


def test_no_attention_is_chosen_only_by_name() -> None:
    level = Level.dense([0], [3], 5)
    q, keys = torch.randn(3, 4, 8), torch.randn(1, 5, 2, 8)
    with no_attention() as impl:
        assert choose("auto", CPU).name == "cpu" and list(LOADERS)[-1] == impl == NO_ATTENTION
        out, lse = attend(q, keys, keys, [level], impl=impl, return_lse=True)
    assert NO_ATTENTION not in LOADERS
    assert out.shape == q.shape and not out.any() and lse.shape == (3, 4)


def test_attention_is_timed_by_every_implementation_and_checked() -> None:
    grid = [(1, 16, 0), (5, 20, 3), (3, 1, 17)]
    results = list(
        attention.measure(
            grid, attention.Heads(4, 2, 16), CEILINGS, device=CPU, dtype=torch.float32, repeats=2
        )
    )
    assert [(r.rows, r.prefix, r.suffix) for r in results] == grid
    for r in results:
        assert set(r.shared) == set(attention.implementations(CPU)) == {"cpu"}
        assert set(r.unshared) == {"cpu reread", "cpu copies", "torch flash"} and not r.skipped
        assert r.error < 1e-4 and None not in (r.over_copies, r.over_reread)
        flops = 4 * r.rows * 4 * 16 * r.prefix
        assert r.prefix_flops == pytest.approx(flops / (r.prefix_us.median * 1e-6))


@pytest.mark.parametrize("fails", ["check", "time", "time without sharing"])
def test_a_failure_without_text_is_named_by_its_type(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError

    case = attention._Case(5, 32, 7, attention.Heads(4, 2, 16), CPU, torch.float32)
    stopwatch = Stopwatch(CPU)
    if fails == "check":
        monkeypatch.setattr(case, "_error", fail)
        assert case.check() == (0.0, {"cpu": "RuntimeError"})
    elif fails == "time":
        skipped: dict[str, str] = {}
        monkeypatch.setattr(stopwatch, "microseconds", fail)
        assert not case.times(stopwatch, 1, skipped) and skipped == {"cpu": "RuntimeError"}
    else:
        calls = [("cpu copies", fail)]
        monkeypatch.setattr(attention, "_iter_unshared_calls", lambda *_: iter(calls))
        result = attention._measure(case, CEILINGS, stopwatch, 1)
        assert result.skipped == {"cpu copies": "RuntimeError"}


def test_the_ways_without_sharing_compute_the_same_attention() -> None:
    case = attention._Case(5, 32, 7, attention.Heads(4, 2, 16), CPU, torch.float32)
    shared = case.call(case.levels(), "cpu")()
    calls = dict(attention._iter_unshared_calls(case, ["cpu", "reference"], {}))
    for name in ("cpu reread", "cpu copies", "reference reread", "reference copies"):
        torch.testing.assert_close(calls[name](), shared)


def test_copies_that_do_not_fit_are_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "free_bytes", lambda device: 2**17)
    heads = attention.Heads(4, 2, 16)
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "repeats": 1}
    (result,) = attention.measure([(8, 64, 2)], heads, CEILINGS, **options)
    assert set(result.skipped) == {"cpu copies", "torch flash"}
    assert set(result.unshared) == {"cpu reread"}
    monkeypatch.setattr(attention, "free_bytes", lambda device: 2**15)
    with pytest.raises(CapacityError, match="fewer --rows"):
        list(attention.measure([(64, 64, 9)], heads, CEILINGS, **options))


def test_without_any_implementation_that_runs_the_error_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_args: Any, **_options: Any) -> None:
        raise RuntimeError("out of memory\ntried to allocate much")

    monkeypatch.setattr(attention, "attend", fail)
    options: dict[str, Any] = {"device": CPU, "dtype": torch.float32, "repeats": 1}
    with pytest.raises(CapacityError, match=r"\(cpu: out of memory\); use fewer --rows"):
        list(attention.measure([(8, 64, 2)], attention.Heads(4, 2, 16), CEILINGS, **options))


def test_the_levels_of_a_cascade_hold_every_row_once_in_groups_of_even_size() -> None:
    case = attention.Cascade(
        7,
        [attention.LevelShape(8, 1), attention.LevelShape(3, 3), attention.LevelShape(2, 7)],
        attention.Heads(2, 1, 8),
        CPU,
        torch.float32,
    )
    levels = case.levels()
    rows = [(level.q_stop_G - level.q_start_G).tolist() for level in levels]
    assert rows == [[7], [3, 2, 2], [1] * 7]
    assert [level.kv_start_G.tolist() for level in levels] == [[0], [8] * 3, [11] * 7]
    pages = torch.cat([level.pages_GP.ravel() for level in levels])
    assert sorted(pages.tolist()) == list(range(len(case.keys)))
    # Some rows alone read the same keys.
    some = case.levels(torch.tensor([0, 2, 3]))
    assert [level.q_stop_G.tolist() for level in some] == [[3], [2, 3], [1, 2, 3]]
    assert some[1].pages_GP.tolist() == levels[1].pages_GP[:2].tolist()


# Runs


def measured(
    tiny_model: tuple[Model, Any], cases: list[Case], **settings: Any
) -> list[WorkloadResult]:
    how = Settings(**{"repeats": 2, "memory": "2MiB", **settings})
    bench = TransformersBench(*tiny_model, CEILINGS, how)
    results = list(bench.measure(cases))
    bench.close()
    return results


def test_every_mode_draws_all_tokens(tiny_model: tuple[Model, Any]) -> None:
    modes = (*DECODE_MODES, GENERATE)
    cases = decode_cases([4, 6], [33], 5, problems=2, problem_tokens=3, modes=modes)
    results = measured(tiny_model, cases)
    assert [(r.rows, r.mode) for r in results] == [
        (4, "all"),
        (4, "one"),
        (4, "off"),
        (6, "all"),
        (6, "one"),
        (6, "off"),
        (4, NO_ATTENTION),
        (6, NO_ATTENTION),
        (4, GENERATE),
        (6, GENERATE),
    ]
    by_mode = {r.mode: r for r in results if r.rows == 6}
    assert not any(r.skipped for r in results)
    assert by_mode["all"].levels == (("level 0", 1, 33), ("level 1", 2, 6))
    assert by_mode["one"].levels == (("level 0", 1, 33),) and not by_mode["off"].levels
    read = {mode: by_mode[mode].read_bytes for mode in ("all", "one", "off")}
    assert read["all"] < read["one"] < read["off"] and by_mode["off"].saved_bytes == 0
    assert by_mode["all"].saved_bytes == read["off"] - read["all"]
    assert by_mode["all"].prompt_tokens == 33 + 2 * 3
    assert by_mode["all"].unshared_prompt_tokens == 6 * 36
    assert by_mode["all"].impl == "cpu" and by_mode[NO_ATTENTION].impl == NO_ATTENTION
    for r in results:
        assert r.job is not None and r.job.low <= r.job.median <= r.job.high
        assert r.seconds is not None and r.startup_seconds is not None and r.startup_seconds > 0
        if r.mode != GENERATE:
            assert r.step_ms is not None and r.share is not None and r.floor_parts_ms is not None
            assert r.floor_ms == pytest.approx(sum(r.floor_parts_ms.values()))
            assert ("own keys" in r.floor_parts_ms) == (r.mode != NO_ATTENTION)
    table = results_table(results)
    assert len(table.rows) == len(results) and {len(row) for row in table.rows} == {len(table.head)}
    assert {"run s", "start-up s"} <= set(table.head)
    # The module is treegen's again.
    llm = LLM(tiny_model[0], tokenizer=tiny_model[1], memory="1MiB")
    assert len(llm.generate(["x"], SamplingParams(max_tokens=2))[0]) == 1


def test_samples_that_end_at_random_are_replaced(tiny_model: tuple[Model, Any]) -> None:
    cases = decode_cases([6], [33], 10, problems=2, problem_tokens=3, modes=["all"], refill=True)
    (result,) = measured(tiny_model, cases)
    assert not result.skipped and result.rows == 6
    workload = result.workload
    assert workload.rows == 48 and workload.name == "refill" and workload.mean_generated == 10
    params = workload.params(tiny_model[0].spec.vocab_size)
    share = len(params.stop_token_ids) / tiny_model[0].spec.vocab_size
    assert share == pytest.approx(1 / 10, rel=0.1) and params.stop and params.max_tokens == 40
    llm = LLM(tiny_model[0], tokenizer=tiny_model[1], memory="2MiB", max_rows=6)
    done = llm.run(workload.tree(tiny_model[1], tiny_model[0].spec.vocab_size), params)
    lengths = [len(sample.tokens) for sample in done.completions]
    assert len(lengths) == 48 and len(set(lengths)) > 8
    assert 4 < sum(lengths) / 48 < 20


def test_the_time_in_passes_over_the_time_from_first_to_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = now[0]

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    def work(seconds: float) -> float:
        now[0] += seconds
        return seconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = PassTimer()
    assert clock.share() is None
    run = clock.wrap_timed(work)
    assert run(3.0) == 3.0
    now[0] += 1.0
    run(seconds=4.0)
    assert clock.share() == pytest.approx(7 / 8)


def test_the_table_names_the_kernel_of_each_level() -> None:
    workload = Workload("w", prefix=8, samples=2, new_tokens=3)

    def shown(kernels: dict[str, dict[str, int]]) -> str:
        return results_table(
            [WorkloadResult(workload, "all", 2, impl="cuda", kernels=kernels)]
        ).rows[0][-1]

    assert shown({}) == "cuda"
    assert shown({"own keys": {"triton": 5}, "level 0": {"triton": 4}}) == "triton"
    mixed = {"own keys": {"triton": 5}, "level 0": {"cudnn": 4, "triton": 1}}
    assert shown(mixed) == "cudnn/triton + triton"


def test_what_cannot_be_run_says_why_and_the_rest_goes_on(tiny_model: tuple[Model, Any]) -> None:
    fits = Workload("fits", prefix=8, samples=2, new_tokens=3, max_rows=2)
    wide = Workload("wide", prefix=8, samples=9000, new_tokens=30, max_rows=9000)
    long = Workload("long", prefix=66_000, samples=1, new_tokens=3, max_rows=1)
    slow = Workload("slow", prefix=8, samples=8, new_tokens=1000, max_rows=8)
    cases = [Case(w, ("all", "off")) for w in (wide, long, slow, fits)]
    results = measured(tiny_model, cases, time_limit=0.01, repeats=1)
    reasons = {r.workload.name: r.skipped for r in results}
    assert "of 9,000 rows fit in memory" in reasons["wide"]
    assert "66,003 tokens" in reasons["long"]
    assert "--time-limit" in reasons["slow"]
    assert reasons["fits"] == "" and len(results) == 8
    assert len(results_table(results).lines) == 6


def test_batches_that_memory_bounds(tiny_model: tuple[Model, Any]) -> None:
    whole = Workload("w", prefix=64, problems=3, problem_tokens=32, samples=8, new_tokens=17)
    largest = Case(whole, ("all", "one", "off"))
    equal = Case(Workload("e", **{**_fields(whole), "equal": True}), ("all", "one", "off"))
    page = 16 * tiny_model[0].spec.kv_bytes_per_token
    results = measured(tiny_model, [largest, equal], memory=str(50 * page), repeats=1)
    rows = {(r.workload.name, r.mode): r.rows for r in results}
    pages = 49
    assert rows["w", "off"] == pages // 8 and rows["w", "one"] == (pages - 4) // 4
    assert rows["w", "all"] > rows["w", "one"]
    assert {rows["e", mode] for mode in largest.modes} == {rows["w", "off"]}
    assert all(r.job is not None for r in results)


def _fields(workload: Workload) -> dict[str, Any]:
    names = ("prefix", "problems", "problem_tokens", "samples", "new_tokens")
    return {name: getattr(workload, name) for name in names}


def test_samples_of_one_token_have_no_decode_steps(tiny_model: tuple[Model, Any]) -> None:
    workload = Workload(
        "mmlu",
        prefix=9,
        problems=3,
        problem_tokens=4,
        samples=1,
        new_tokens=1,
        prefixes=2,
        max_rows=4,
    )
    (result,) = measured(tiny_model, [Case(workload, ("all",))])
    assert result.tokens_per_second is None and result.floor_ms is None
    assert result.job is not None and result.prompt_tokens == 2 * (9 + 3 * 4)


# Timing


def test_ceilings_are_rates_of_work_that_was_done() -> None:
    found = ceilings.measure(CPU, torch.float32, 0.003)
    assert min(found.matmul, found.attention, found.memory) > 0
    assert found.attention_kernel == "flash" and "float32" in str(found)


def test_what_is_timed_is_called_as_often_as_told() -> None:
    calls: list[int] = []
    assert Stopwatch(CPU).microseconds(lambda: calls.append(1), 5).low > 0
    assert len(calls) == 7
    assert time_sustained(lambda: calls.append(1), CPU, 1e-4) > 0
    assert Spread.of([3.0, 1.0, 2.5]) == Spread(2.5, 1.0, 3.0)
