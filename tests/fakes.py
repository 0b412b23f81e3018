"""A model and a tokenizer without weights, for testing the engine in milliseconds.

HistoryModel keeps each token and its position in the key-value pages and answers with logits that
are a hash of the whole context it can see through them. If a row sees one token too few, too
many, twice or at a wrong place, it fails or its samples change. If it is made to be recurrent it
also hashes the context token by token into a state, and both must agree.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from penalized import Budgets, bound_text, has_failed, plain, slow_logits
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as AsText
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.common.spec import DeltaSpec
from treegen.engine.compute.model_runner import ModelRunner
from treegen.engine.engine import insert_prefix
from treegen.engine.param_set import ParamSet
from treegen.engine.resources import EngineResources
from treegen.engine.scheduler import Scheduler
from treegen.engine.segments.prefix_cache import PrefixCache
from treegen.engine.segments.segment import LiveRequest
from treegen.model.batch import Batch
from treegen.ops.attention import HostLevel
from treegen.ops.cache.pool import LayerKV, PagedCache
from treegen.ops.cache.state_cache import StateCache
from treegen.ops.recurrence import DeltaStates
from treegen.ops.sampling.batch import SamplingBatch
from treegen.ops.sampling.draw import draw
from treegen.prompts.plan.compile import compile_plan
from treegen.prompts.plan.draws import row_seed
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.stops import StopConditions

if TYPE_CHECKING:
    from treegen.engine.compute.decode_graphs import DecodeGraphs
    from treegen.engine.compute.prefill_graphs import PrefillGraphs
    from treegen.engine.speculative.speculation import SpeculationOptions

EOS = 1


class LetterTokenizer:
    """Token t is one letter; token 1 ends a sequence and has no text."""

    is_fast = False

    def __init__(self, vocab_size: int = 24) -> None:
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self.vocab_size

    @functools.cached_property
    def backend_tokenizer(self) -> Tokenizer:
        vocab = {chr(97 + token): token for token in range(self.vocab_size)}
        vocab["<end>"] = vocab.pop(chr(97 + EOS))
        backend = Tokenizer(BPE(vocab, []))
        backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), AsText()
        backend.add_special_tokens(["<end>"])
        return backend

    def encode(self, text: str, **options: Any) -> list[int]:
        return [ord(letter) - 97 for letter in text.replace(" ", "")]

    def decode(self, ids: Sequence[int], **options: Any) -> str:
        return "".join(chr(97 + int(token)) for token in ids if token != EOS)

    def __call__(self, texts: Sequence[str], **options: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) - 97 for letter in text] for text in texts]}


class HistoryModel:
    """Logits are a pure function of the tokens that a row can see through the pages."""

    device = torch.device("cpu")

    def __init__(
        self,
        vocab_size: int = 24,
        eos_bias: float = 0.0,
        *,
        recurrent: bool = False,
        delta: DeltaSpec | None = None,
    ) -> None:
        """delta: how rows list updates of states; `fold_hashes` then has to stand for `fold`."""
        self.vocab_size, self.eos_bias, self.recurrent = vocab_size, eos_bias, recurrent
        self.delta = delta
        self.tokens_computed = 0
        self.bad_at: int | None = None  # number of passes after which logits are NaN

    def new_cache(self, num_pages: int, page_size: int, num_states: int = 1000) -> PagedCache:
        # Poisoned: what was never written must never be read.
        shape = (num_pages + 1, page_size, 1, 2)
        layer = LayerKV(torch.full(shape, -7.0), torch.full(shape, -7.0))
        states = None
        if self.delta is not None:
            size = self.delta.pages * self.delta.page_tokens
            windows = torch.full((num_states + 2 + 8, 2), -7)
            slots = torch.full((num_states + 2, size), -7)
            states = StateCache([[windows, slots]], num_states, self.delta)
        elif self.recurrent:
            states = StateCache([[torch.full((num_states + 1,), -7)]], num_states)
        return PagedCache([layer], num_pages, page_size, states)

    def forward(self, batch: Batch) -> Tensor:
        pool = batch.layers[0].keys
        page_size = pool.shape[1]
        self.tokens_computed += len(batch.tokens_T)
        flat, positions = pool.view(-1, 2).numpy(), batch.positions_T.tolist()
        flat[batch.slots_T.numpy(), 0] = batch.tokens_T.numpy()
        flat[batch.slots_T.numpy(), 1] = positions
        # Of a CUDA graph, those that were put into it last.
        levels: Sequence[HostLevel] = getattr(batch.levels.state, "levels", batch.levels.levels)
        groups = [_group_of_rows(level, len(batch.tokens_T)) for level in levels]
        hashes = None
        if batch.states is not None:
            hashes = _hashes(batch) if self.delta is None else _listed_hashes(batch, self.delta)
        assert (hashes is None) != self.recurrent, "states are given to the wrong models"
        rows = []
        known: dict[tuple[int, int], NDArray[np.float32]] = {}  # what rows of a group share
        for row in batch.logits_at_S.tolist():
            keys = []
            for at, (level, group) in enumerate(zip(levels, groups, strict=True)):
                if (g := group[row]) >= 0:
                    if (at, g) not in known:
                        known[at, g] = _keys(level, g, flat, page_size)
                    keys.append(known[at, g])
            if not keys:  # padding of a CUDA graph
                rows.append(torch.zeros(self.vocab_size))
                continue
            seen = np.concatenate(keys)
            seen = seen[seen[:, 1] <= positions[row]]
            seen = seen[seen[:, 1].argsort()]
            assert np.array_equal(seen[:, 1], np.arange(positions[row] + 1)), seen[:, 1].tolist()
            tokens = seen[:, 0].astype(np.int32).tolist()
            if hashes is not None:
                assert hashes[row] == functools.reduce(_hashed, tokens, 0), "a state is wrong"
            rows.append(self.logits(tokens))
        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size)
        if self.bad_at is not None:
            self.bad_at -= 1
            if self.bad_at < 0:
                logits[-1:] = torch.nan
        return logits

    def logits(self, tokens: Sequence[int]) -> Tensor:
        logits = _logits(np.array(tokens, dtype=np.int32).tobytes(), self.vocab_size).copy()
        logits[EOS] += self.eos_bias
        return torch.from_numpy(logits)


@functools.lru_cache(maxsize=2**16)
def _logits(context: bytes, vocab_size: int) -> NDArray[np.float32]:
    digest = hashlib.blake2b(context, digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "big"))
    return generator.normal(size=vocab_size).astype(np.float32) * 2


def _hashed(state: int, token: int) -> int:
    """The state after one more token."""
    return (state * 1_000_003 + token + 1) % (2**61 - 1)


def _hashes(batch: Batch) -> list[int]:
    """The state after each row of a pass; what the pass writes is in its slots."""
    assert batch.states is not None
    ((states,),) = batch.states.layers
    hashes = [-1] * len(batch.tokens_T)
    for run in batch.states.runs:
        rows = torch.arange(len(hashes))[run.rows].view(run.num, run.length)
        reads = [0] * run.num if run.read_slots_N is None else states[run.read_slots_N].tolist()
        for at, (state, written) in enumerate(zip(reads, rows.tolist(), strict=True)):
            assert state >= 0, "a state is read that was never written"
            for row in written:
                assert hashes[row] == -1, "a token is in two sequences"
                state = hashes[row] = _hashed(state, int(batch.tokens_T[row]))
            states[run.write_slots_N[at]] = state
    assert -1 not in hashes, "a token is in no sequence"
    return hashes


class SmallLists(DeltaSpec):
    """Lists that are soon folded. A state is a hash, the first number of its slot."""

    pages = 2
    page_tokens = 2
    own_tokens = 2


def _listed_hashes(batch: Batch, delta: DeltaSpec) -> list[int]:
    """Likewise of a model that lists updates, which are tokens here.

    A window has the state one token ago and the last one, so that the two can be compared.
    """
    assert batch.states is not None
    ((windows, states),) = batch.states.layers
    hashes = [-1] * len(batch.tokens_T)
    if batch.states.rows is not None:
        flat = states.view(-1)
        for row, (base, listed, before, after, *pages) in enumerate(
            batch.states.rows.inputs_RT.T.tolist()
        ):
            state = _folded(states, delta, base, listed, pages)
            assert windows[before, 1] == state, "a window is that of another state"
            token = int(batch.tokens_T[row])
            hashes[row] = _hashed(state, token)
            windows[after] = torch.tensor([state, hashes[row]])
            size = delta.page_tokens
            flat[pages[listed // size] * size + listed % size] = token
        return hashes
    for run in batch.states.runs:
        rows = torch.arange(len(hashes))[run.rows].view(run.num, run.length)
        reads = [0] * run.num if run.read_slots_N is None else run.read_slots_N.tolist()
        found = [int(states[slot, 0]) if slot else 0 for slot in reads]
        for slot, state, written, writes in zip(
            reads, found, rows.tolist(), run.write_slots_N.tolist(), strict=True
        ):
            assert not slot or windows[slot, 1] == state, "a window is that of another state"
            before = -7
            for row in written:
                before, state = state, _hashed(state, int(batch.tokens_T[row]))
                hashes[row] = state
            windows[writes], states[writes, 0] = torch.tensor([before, state]), state
    assert -1 not in hashes, "a token is in no sequence"
    return hashes


def _folded(states: Tensor, delta: DeltaSpec, base: int, listed: int, pages: Sequence[int]) -> int:
    """The state after the tokens of a list."""
    state, size = int(states[base, 0]), delta.page_tokens
    assert base and state >= 0, "a state is read that was never written"
    for at in range(listed):
        state = _hashed(state, int(states.view(-1)[pages[at // size] * size + at % size]))
    return state


def fold_hashes(
    on: DeltaStates, base_F: Tensor, target_F: Tensor, listed_F: Tensor, pages_PF: Tensor
) -> None:
    """`treegen.ops.recurrence.fold_update_lists` of hashes; reads all before it writes."""
    given = zip(base_F.tolist(), listed_F.tolist(), pages_PF.T.tolist(), strict=True)
    made = [_folded(on.states, on.spec, *each) for each in given]
    on.states[target_F, 0] = torch.tensor(made)


def _group_of_rows(level: HostLevel, num_rows: int) -> list[int]:
    """The group of each row in a level, -1 for none."""
    group = [-1] * num_rows
    for g, (start, stop) in enumerate(
        zip(level.start_G.tolist(), level.stop_G.tolist(), strict=True)
    ):
        assert set(group[start:stop]) <= {-1}, "groups of a level overlap"
        group[start:stop] = [g] * (min(stop, num_rows) - start)
    return group


def _keys(
    level: HostLevel, g: int, flat: NDArray[np.float32], page_size: int
) -> NDArray[np.float32]:
    """Keys of a group, as (token, position) pairs."""
    offsets = np.arange(int(level.kv_len_G[g]))
    slots = np.asarray(level.pages_GP[g])[offsets // page_size] * page_size
    keys = flat[slots + offsets % page_size]
    # What lies after a row's own position may not be written yet.
    written = keys[:, 1] >= 0
    expected = int(level.kv_start_G[g]) + offsets[written]
    assert (keys[written, 1] == expected).all(), "a key lies at a wrong position"
    return keys


def make_stop_conditions(params: SamplingParams, vocab_size: int = 24) -> StopConditions:
    return StopConditions(params, LetterTokenizer(vocab_size), [EOS], vocab_size)


def scheduler_of(
    plan: Plan,
    model: HistoryModel,
    cache: PagedCache,
    params: SamplingParams,
    *,
    kept: PrefixCache | None = None,
    samples: Sequence[Sequence[int]] | None = None,
    on_prefilled: Callable[[LiveRequest], None] | None = None,
    graphs: DecodeGraphs | None = None,
    prefills: PrefillGraphs | None = None,
    speculation: SpeculationOptions | None = None,
    **resources: Any,
) -> Scheduler:
    """Return a scheduler. resources: max_rows, prefill_chunk and run_ahead of `EngineResources`."""
    impl = "reference" if graphs is None else "triton"
    return Scheduler(
        plan,
        EngineResources(
            model=model,
            cache=cache,
            prefix_cache=kept or PrefixCache(cache, cache.pool.num_pages // 2),
            model_runner=ModelRunner(model, cache, graphs, impl, prefills=prefills),
            **{"max_rows": 64, "prefill_chunk": 64, "run_ahead": False, **resources},
        ),
        [ParamSet(params, make_stop_conditions(params, model.vocab_size))],
        samples or [range(request.samples) for request in plan.requests],
        on_prefilled=on_prefilled,
        speculation=speculation,
    )


def keep_prefix(
    name: str, tokens: Sequence[int], model: HistoryModel, cache: PagedCache, kept: PrefixCache
) -> None:
    """Compute a prefix and keep it, as LLM.keep does."""
    array = np.array(tokens, dtype=np.int32)
    request = Request(name, array, samples=0, rows=0, max_tokens=1)
    others = [prefix.tokens for prefix in kept]
    plan = compile_plan([request], token_bytes=64, num_layers=1, sharing="off", split_at=others)

    def keep(request: LiveRequest) -> None:
        insert_prefix(request, name, cache, kept)

    scheduler = scheduler_of(plan, model, cache, SamplingParams(), kept=kept, on_prefilled=keep)
    drain(scheduler)
    scheduler.close()


def _progress(scheduler: Scheduler) -> int:
    usage = scheduler.usage
    return usage.prefill_steps + usage.decode_steps + usage.decoded_tokens


def drain(scheduler: Scheduler, *, check: bool = True) -> list[Completion]:
    """Run to the end, checking every page reference after every step."""
    finished = []
    for _ in range(100_000):
        if not scheduler.has_work:
            break
        before, flight = _progress(scheduler), scheduler.flight
        ended = scheduler.step()
        finished += ended
        after = _progress(scheduler)
        done = after > before or flight is not None or ended or not scheduler.has_work
        assert done, "a step did nothing"
        if check:
            scheduler.check()
    assert not scheduler.has_work, "the scheduler still has work"
    return finished


def sample_alone(
    model: HistoryModel,
    prompt: list[int],
    name: str,
    index: int,
    params: SamplingParams,
    *,
    limit: int,
    before: Sequence[bool] | None = None,
    budgets: Budgets = (),
) -> tuple[int, ...]:
    """Tokens of one sample, drawn without any cache of keys. Each is drawn once in a process.

    Args:
        before: Which tokens of the prompt were drawn too; by default none.
        budgets: Of the samples before that have its grammar.
    """
    name_of = (type(model), model.vocab_size, model.eos_bias, params.sampling_key)
    drawn_before = [False] * len(prompt) if before is None else list(before)
    budgets = (*budgets, (len(prompt), params.max_thinking_tokens))
    key = (*name_of, tuple(prompt), name, index, limit, tuple(drawn_before), budgets)
    if key not in _alone:
        _alone[key] = _drawn_alone(model, prompt, name, index, params, limit, drawn_before, budgets)
    return _alone[key]


_alone: dict[tuple[object, ...], tuple[int, ...]] = {}


def _drawn_alone(
    model: HistoryModel,
    prompt: list[int],
    name: str,
    index: int,
    params: SamplingParams,
    limit: int,
    before: list[bool],
    budgets: Budgets,
) -> tuple[int, ...]:
    stopping = make_stop_conditions(params, model.vocab_size)
    each = ParamSet(params, stopping)
    one = SamplingBatch.of([plain(params)], torch.zeros(1, dtype=torch.int64))
    seed = torch.tensor([[row_seed(params.seed, name, index)]])
    tokens: list[int] = []
    forced: list[int] = []
    while not tokens or stopping.endings([prompt], [tokens], [limit]) == [None]:
        text = [*prompt, *tokens]
        drawn_before = before + [True] * len(tokens)
        forced = forced or _closing(prompt, tokens, params, budgets)
        if tokens and not forced and has_failed(text, params, budgets):
            break
        logits = slow_logits(model.logits(text), text, drawn_before, each, len(tokens), budgets)[
            None
        ]
        drawn = int(draw(logits, seed, torch.tensor([[len(tokens)]]), one).tokens_PN)
        tokens.append(forced.pop(0) if forced else drawn)
    return tuple(tokens)


def _closing(
    prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, budgets: Budgets
) -> list[int]:
    """The tokens that a sample is given next because its budget for thinking is used up.

    What is within a grammar is no thinking.
    """
    if params.max_thinking_tokens is None:
        return []
    if params.structure is not None and (tokens or len(budgets) > 1):
        bound = bound_text([*prompt, *tokens], params, budgets)
        if bound is not None:
            return []
    assert params.reasoning_tags is not None and params.thinking_end is not None
    (begin, end), letters = params.reasoning_tags, LetterTokenizer().decode
    begun = letters(prompt).endswith(begin)
    if len(tokens) != params.max_thinking_tokens + (0 if begun else len(begin)):
        return []
    thinks = end not in letters(tokens) and (begun or letters(tokens).startswith(begin))
    return [ord(letter) - 97 for letter in params.thinking_end] if thinks else []


def expected(
    model: HistoryModel, plan: Plan, params: SamplingParams
) -> dict[tuple[str, int], tuple[int, ...]]:
    """Tokens of every sample, one sample at a time."""
    return {
        (request.id, index): sample_alone(
            model, request.tokens.tolist(), request.id, index, params, limit=request.max_tokens
        )
        for request in plan.requests
        for index in range(request.samples)
    }
