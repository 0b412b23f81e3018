"""Every family said to be exact, against transformers' own generate on each prompt alone."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from tiny_models import EXACT, HYBRID, REFUSED, SELECTED, config_of, known, save_tiny_model
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from treegen import LLM, SamplingParams
from treegen.errors import ContextError, ModelError, ModelWarning
from treegen.model.batch import Batch
from treegen.model.checkpoint import families, quantization
from treegen.model.checkpoint.text_part import auto_class
from treegen.model.config import load_spec
from treegen.model.load import load_model
from treegen.model.model import Model
from treegen.model.recurrent.layer_states import LayerStates
from treegen.model.recurrent.layers import RecurrentLayer, SlotPass, StatePass
from treegen.model.recurrent.state_batch import Piece, states_of_pieces
from treegen.ops.attention import Level, prepare
from treegen.ops.cache.pool import LayerKV
from treegen.ops.cache.state_cache import NO_STATE

PREFIX = 13
PROBLEMS = (3, 7, 1)
STEPS = 5
# Seen to be refused under transformers 5.17.
NEWER = {"aria_text", "aria_on_text", "moshi"}
PAGE = 4


class Tree:
    """A prefix, problems below it and one decoded row below each problem, driven by hand."""

    def __init__(self, model: Model, prefix: Tensor, problems: Sequence[Tensor]) -> None:
        self.model = model
        self.num_pages = 0
        self.prefix = prefix
        self.problems = problems
        self.trunk = self.pages(len(prefix))
        self.own = [self.pages(len(p)) for p in problems]
        self.tails = [self.pages(STEPS) for _ in problems]
        self.pools: list[LayerKV] = model.new_cache(self.num_pages, PAGE)
        # Of recurrent layers: slot 1 for the prefix, then one for each problem and its row.
        self.states = model.new_states(2 + len(problems))

    def pages(self, num_tokens: int) -> list[int]:
        """Take fresh pages for so many tokens."""
        first = self.num_pages
        self.num_pages += -(-num_tokens // PAGE)
        return list(range(first, self.num_pages))

    def level(
        self,
        rows: Sequence[tuple[int, int]],
        pages: Sequence[Sequence[int]],
        lengths: Sequence[int],
        starts: Sequence[int],
        causal: bool,
    ) -> Level:
        width = max(map(len, pages))
        table = [[*p, *[0] * (width - len(p))] for p in pages]
        return Level(
            q_start_G=torch.tensor([r[0] for r in rows], dtype=torch.int32),
            q_stop_G=torch.tensor([r[1] for r in rows], dtype=torch.int32),
            pages_GP=torch.tensor(table, dtype=torch.int32),
            kv_len_G=torch.tensor(lengths, dtype=torch.int32),
            kv_start_G=torch.tensor(starts, dtype=torch.int32),
            causal=causal,
        )

    def forward(
        self,
        spans: Sequence[tuple[Tensor, int, Sequence[int], int]],
        levels: Sequence[Level],
        logits_at: Sequence[int],
        states: Sequence[tuple[int, int]],
    ) -> Tensor:
        """One pass over spans of (tokens, position, pages, offset in the pages).

        Args:
            states: The slots of the recurrent states before and after each span.
        """
        ends = torch.tensor([0, *(len(t) for t, _, _, _ in spans)]).cumsum(0).tolist()
        pieces = [
            Piece(start, stop - start, reads, writes)
            for start, stop, (reads, writes) in zip(ends, ends[1:], states, strict=False)
        ]
        positions = torch.cat([torch.arange(at, at + len(t)) for t, at, _, _ in spans])
        slots = [
            pages[(offset + i) // PAGE] * PAGE + (offset + i) % PAGE
            for t, _, pages, offset in spans
            for i in range(len(t))
        ]
        batch = Batch(
            tokens_T=torch.cat([t for t, _, _, _ in spans]),
            positions_T=positions,
            slots_T=torch.tensor(slots),
            logits_at_S=torch.tensor(logits_at, dtype=torch.int64),
            levels=prepare(levels, positions),
            layers=self.pools,
            states=states_of_pieces(pieces, self.states) if self.states else None,
        )
        return self.model.forward(batch)

    def prefill(self) -> Tensor:
        """Compute the prefix, then all problems in one pass: logits of each problem's last row."""
        n = len(self.prefix)
        none = self.forward(
            [(self.prefix, 0, self.trunk, 0)],
            [self.level([(0, n)], [self.trunk], [n], [0], True)],
            [],
            [(NO_STATE, 1)],
        )
        assert none.shape == (0, self.model.spec.vocab_size)
        lengths = [len(p) for p in self.problems]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        rows = list(zip([0, *ends[:-1]], ends, strict=True))
        return self.forward(
            [(p, n, pages, 0) for p, pages in zip(self.problems, self.own, strict=True)],
            [
                self.level([(0, ends[-1])], [self.trunk], [n], [0], False),
                self.level(rows, self.own, lengths, [n] * len(rows), True),
            ],
            [end - 1 for end in ends],
            [(1, 2 + i) for i in range(len(rows))],
        )

    def decode(self, tokens: Tensor, step: int) -> Tensor:
        """Compute one more token of each row: its logits."""
        n, count = len(self.prefix), len(self.problems)
        lengths = [len(p) for p in self.problems]
        rows = [(i, i + 1) for i in range(count)]
        starts = [n + m for m in lengths]
        return self.forward(
            [(tokens[i : i + 1], starts[i] + step, self.tails[i], step) for i in range(count)],
            [
                self.level([(0, count)], [self.trunk], [n], [0], False),
                self.level(rows, self.own, lengths, [n] * count, False),
                self.level(rows, self.tails, [step + 1] * count, starts, False),
            ],
            list(range(count)),
            [(2 + i, 2 + i) for i in range(count)],
        )


def greedy_in_a_tree(model: Model, prefix: Tensor, problems: Sequence[Tensor]) -> tuple[Any, Any]:
    """Decode greedily below each problem: tokens [rows, STEPS + 1] and their logits."""
    tree = Tree(model, prefix, problems)
    logits = [tree.prefill()]
    tokens = [logits[0].argmax(-1)]
    for step in range(STEPS):
        logits.append(tree.decode(tokens[-1], step))
        tokens.append(logits[-1].argmax(-1))
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def greedy_alone(stock: Any, prompt: Tensor) -> tuple[Tensor, Tensor]:
    """Decode greedily with transformers' generate: tokens [STEPS + 1] and their logits."""
    stock.generation_config.eos_token_id = None
    out = stock.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt)[None],
        max_new_tokens=STEPS + 1,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :], torch.cat(out.logits)


@pytest.mark.parametrize("family", EXACT | HYBRID)
def test_a_tree_decodes_like_each_prompt_alone(family: str, tmp_path: Path) -> None:
    if not known((EXACT | HYBRID)[family][0]):
        pytest.skip(f"this transformers has no {(EXACT | HYBRID)[family][0]}")
    if family in NEWER and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(f"{family} is refused under older transformers")
    if why := families.refusal((EXACT | HYBRID)[family][0]):
        pytest.skip(f"with this transformers: {why}")
    directory = save_tiny_model(tmp_path, family, seed=1)
    model = load_model(directory, device="cpu")
    # eos and the like are ordinary tokens here: nothing stops.
    ids = torch.randint(
        3, 320, (PREFIX + sum(PROBLEMS),), generator=torch.Generator().manual_seed(2)
    )
    prefix, *problems = ids.split([PREFIX, *PROBLEMS])
    tokens, logits = greedy_in_a_tree(model, prefix, problems)
    # The logits of dory are five times as narrow as those of others. From float64, the tree's
    # differ by 3.0e-7, and transformers' own by 2.4e-7.
    limit = 5e-6 if family == "dory" else 1e-4
    # Not sdpa, which some versions choose for gemma2 though it drops the soft cap.
    stock = auto_class(model.module.config).from_pretrained(directory, attn_implementation="eager")
    for i, problem in enumerate(problems):
        want_tokens, want_logits = greedy_alone(stock, torch.cat([prefix, problem]))
        assert tokens[i].tolist() == want_tokens.tolist()
        torch.testing.assert_close(logits[i], want_logits, atol=limit, rtol=limit)
    assert len(tokens.unique()) > STEPS, "greedy decoding is degenerate; the test would see little"
    assert logits.std(-1).min() > 0.1


SELECTING = {name.removesuffix("_text") for name in families.SELECTING}
"""Families that are exact beyond the keys that they select: see test_selected_keys.py."""
SPARSE = [
    name
    for name, (_, settings) in (EXACT | HYBRID).items()
    if name.removesuffix("_on_text") not in SELECTING
    and {"index_topk", "index_topk_blocks", "indexer_budget"} & {*settings}
]


@pytest.mark.parametrize("family", SPARSE)
def test_sparse_attention_is_exact_up_to_the_keys_that_it_selects(
    family: str, tmp_path: Path
) -> None:
    if not known((EXACT | HYBRID)[family][0]):
        pytest.skip(f"this transformers has no {(EXACT | HYBRID)[family][0]}")
    directory = save_tiny_model(tmp_path, family, max_position_embeddings=2 * SELECTED)
    with pytest.warns(ModelWarning, match="64 tokens instead of 128; .* sparse attention"):
        llm = LLM(str(directory), device="cpu", memory="16MiB", check=False)
    assert llm.model.spec.context_length == SELECTED
    ids = torch.randint(3, 320, (SELECTED,), generator=torch.Generator().manual_seed(2))
    prompts = [ids[:30], torch.cat([ids[:41], ids[:3]]), ids[: SELECTED - STEPS - 1]]
    params = SamplingParams(temperature=0, max_tokens=STEPS + 1, ignore_eos=True)
    outputs = llm.generate([prompt.tolist() for prompt in prompts], params)
    stock = auto_class(llm.model.module.config).from_pretrained(
        directory, attn_implementation="eager"
    )
    for output, prompt in zip(outputs, prompts, strict=True):
        tokens, logits = greedy_alone(stock, prompt)
        assert list(output.outputs[0].tokens) == tokens.tolist()
        want = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(output.outputs[0].logprobs), want, atol=1e-4, rtol=0
        )
    with pytest.raises(ContextError, match="more than fit into the model's context of 64"):
        llm.generate([ids.tolist()], params)


def test_sparse_attention_that_leaves_out_the_last_keys_is_refused(tmp_path: Path) -> None:
    if not known("glm5_next"):
        pytest.skip("this transformers has no glm5_next")
    model_type, settings = HYBRID["glm5_next_on_text"]
    config = config_of(model_type, **settings, index_kpool_always_select_tail=False)
    with pytest.raises(ModelError, match="layers of type indexed_attention"):
        families.refuse_family(config)


# Families that older versions of transformers compute without the attention interface.
BY_VERSION = {"codegen": EXACT["codegen"], "gptj": EXACT["gptj"]}


@pytest.mark.parametrize("family", BY_VERSION)
def test_a_family_is_refused_if_and_only_if_the_installed_transformers_bypasses_the_interface(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type = BY_VERSION[family][0]
    save_tiny_model(tmp_path, family)
    kind = auto_class(config_of(model_type))._model_mapping[type(config_of(model_type))]
    calls_it = "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[kind.__module__])
    if calls_it:
        assert families.get_support(model_type) == "exact" and families.inputs_of(model_type)
        assert load_model(tmp_path, device="cpu").spec.model_type == model_type
        # As the class of older versions says of itself.
        monkeypatch.setattr(kind, "_supports_attention_backend", False)
        assert families.get_support(model_type) == "refused" and not families.inputs_of(model_type)
    with pytest.raises(ModelError, match="without transformers' attention interface"):
        load_spec(tmp_path)


@pytest.mark.parametrize("family", REFUSED)
def test_families_that_would_be_wrong_are_refused(family: str, tmp_path: Path) -> None:
    model_type, settings = REFUSED[family]
    if not known(model_type):
        pytest.skip(f"this transformers has no {model_type}")
    config_of(model_type, **settings).save_pretrained(tmp_path)
    with pytest.raises(ModelError) as caught:
        load_spec(tmp_path)
    message = str(caught.value)
    assert model_type in message
    assert families.REFUSED[model_type] in message
    assert "\n" not in message


@pytest.mark.parametrize("family", REFUSED | BY_VERSION)
def test_refused_families_are_noticed_without_the_list(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, settings = (REFUSED | BY_VERSION)[family]
    if not known(model_type) or not families.refusal(model_type):
        pytest.skip(f"this transformers lacks it, or computes {family} by its attention interface")
    config_of(model_type, **settings).save_pretrained(tmp_path)
    monkeypatch.setattr(families, "REFUSED", {})
    with pytest.raises(ModelError, match=model_type):
        load_spec(tmp_path)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next", "bamba"])
def test_the_load_check_sees_state_that_leaks_between_branches(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the tokens of a pass were one sequence, whatever sequences they are of."""
    save_tiny_model(tmp_path, family)

    def run(self: StatePass, layer: RecurrentLayer, arguments: dict[str, Any]) -> Any:
        return layer.forward(arguments, LayerStates({}))

    for kind in (StatePass, SlotPass):
        monkeypatch.setattr(kind, "run", run)
    with pytest.raises(ModelError, match=rf"{family}.*cannot be used"):
        load_model(tmp_path, device="cpu")


# --- docs/models.md ------------------------------------------------------------------------------


def section(repository: Path, title: str, page: str = "models.md") -> str:
    """The text under one heading of docs/models.md, or of another page."""
    page = (repository / "docs" / page).read_text(encoding="utf-8")
    return page.split(f"## {title}\n")[1].split("\n## ")[0]


def names_in(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_documented_families_are_those_tested_here(repository: Path) -> None:
    wrapped = {EXACT[name][0] for name in EXACT if name.endswith("_on_text")}
    plain = {model_type for model_type, _ in EXACT.values()} - wrapped
    documented_tables = (
        ("Exact", plain, families.EXACT),
        ("Exact on text", wrapped, families.ON_TEXT),
    )
    for title, tested, table in documented_tables:
        names = names_in(section(repository, title))
        assert names == sorted(tested) == list(table)
        assert f"{len(names)} families" in section(repository, title)
    counts = f"{len(plain)} text families, {len(wrapped)} multimodal families"
    assert counts in " ".join((repository / "README.md").read_text(encoding="utf-8").split())


def test_the_documented_recurrent_families_are_those_tested_here(repository: Path) -> None:
    text = section(repository, "Exact with recurrent layers")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE)[1:]
    names = [name for _, names in rows for name in names_in(names)]
    assert sorted(names) == sorted({model_type for model_type, _ in HYBRID.values()})
    assert {kind: tuple(names_in(each)) for kind, each in rows} == families.RECURRENT
    assert f"{len(names)} families whose layers are partly recurrent" in text
    counts = f"and {len(names)} families with recurrent layers"
    assert counts in " ".join((repository / "README.md").read_text(encoding="utf-8").split())


def test_the_table_of_families_counts_those_listed_below(repository: Path) -> None:
    page = (repository / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(.+?)\]\(#.+?\) \| (\d+) \| (.+?) \|$", page, re.MULTILINE)
    assert len(rows) == 3
    for title, count, how in rows:
        assert f"{count} families" in section(repository, title)
        assert families.SUPPORT_LEVELS[title.lower()] == how


def test_the_documented_ways_of_storing_weights_are_those_of_the_code(repository: Path) -> None:
    found = re.findall(
        r"^\| (`.+?`) \| .+? \| (.+?) \|$",
        section(repository, "Quantized checkpoints", "models/weights.md"),
        re.MULTILINE,
    )
    documented = {(name, how) for names, how in found[1:] for name in names_in(names)}
    implemented = {
        *((name, "kept in FP8, or dequantized") for name in quantization.FP8_METHODS),
        *((name, "kept in 4 bits, or dequantized") for name in quantization.FP4_METHODS),
        *((name, "dequantized") for name in quantization.EXPANDED_METHODS),
    }
    assert documented == implemented


def test_the_documented_families_of_sparse_attention_are_those_of_the_code(
    repository: Path,
) -> None:
    text = section(repository, "Sparse attention")
    known_names = {*CONFIG_MAPPING, *SELECTING}
    documented = {name.removesuffix("_text") for name in names_in(text) if name in known_names}
    assert documented == SELECTING


def test_the_documented_refusals_are_those_of_the_code(repository: Path) -> None:
    rows = re.findall(
        r"^\| (.+?) \| (.+?) \|$", section(repository, "Not supported"), re.MULTILINE
    )[1:]
    documented = {name: reason for reason, names in rows for name in names_in(names)}
    for name, reason in families.REFUSED.items():
        assert documented.pop(name) == reason
    # The rest is refused for what its configuration says of its layers.
    for name, reason in documented.items():
        if known(name):
            with pytest.raises(ModelError) as caught:
                families.refuse_family(CONFIG_MAPPING[name]())
            # Older versions of transformers have other names of that type.
            text = re.sub(
                r"\b(deepseek|qwen)_sparse_attention", "indexed_attention", str(caught.value)
            )
            assert reason in text


@pytest.mark.parametrize(
    ("family", "settings", "length"),
    [
        ("deepseek_v32", {"index_topk": 20, "layer_types": ["full_attention"] * 2}, 20),
        ("glm_moe_dsa", {"index_topk": 24, "layer_types": ["full_attention"] * 2}, 24),
        ("llama4_text", {}, None),
    ],
)
def test_keys_are_limited_whatever_layers_are_called(
    family: str, settings: dict[str, Any], length: int | None
) -> None:
    """The layers select keys although their types say full attention."""
    if not known(family):
        pytest.skip(f"this transformers has no {family}")
    config = CONFIG_MAPPING[family](num_hidden_layers=2, **settings)
    assert families.dense_length(config.get_text_config(decoder=True)) == length
