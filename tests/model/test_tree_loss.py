"""Gradients over packed trees, against stock transformers on each sample alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import (
    EXACT,
    HYBRID,
    REFUSED,
    config_of,
    known,
    spread_weights,
    tiny_tokenizer,
)
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3_moe import modeling_qwen3_moe
from tree_cases import degenerate_trees, random_tree

import treegen
from treegen import LLM, SamplingParams
from treegen.errors import ContextError, InputError, ModelError
from treegen.model.checkpoint.text_part import auto_class
from treegen.model.load import from_module
from treegen.model.training import trainable
from treegen.model.training.tree_logprobs import tree_logprobs
from treegen.prompts.rollout_tree import RolloutTree, Segment, tree_of

# What each family is for; the numbers of layers, windows and the like are in tiny_models.py.
FAMILIES = {
    "llama": "grouped heads",
    "qwen2": "biases",
    "qwen3": "norms of heads",
    "qwen3_moe": "experts",
    "mixtral": "experts, another router",
    "olmoe": "experts that are scored by a softmax of all",
    "deepseek_v2": "latents, experts in groups",
    "deepseek_v3": "latents, experts with a bias",
    "minicpm3": "latents, dense",
    "glm4_moe": "a shared expert",
    "gpt_oss": "sinks, windows, experts with biases",
    "mistral_swa": "a window in every layer",
    "gemma": "scaled embeddings",
    "gemma2": "soft caps of attention and of logits, windows",
    "gemma3": "windows with their own RoPE",
    "gemma3n": "layers that share keys",
    "gemma4": "layers that share keys, wide global heads",
    "cohere2": "layers without positions",
    "smollm3": "layers without positions",
    "gpt2": "learned positions",
    "gpt_bigcode": "one key head",
    "gpt_neox": "parallel layers",
    "opt": "learned positions with an offset",
    "phi": "rotates a part of a head",
    "dory": "layers that run three times",
    "mimo_v2_flash": "values narrower than keys",
    "qwen2_vl_on_text": "the text part of a multimodal model",
}
CASES = [(name, 1 + at % 6, 200 + at) for at, name in enumerate(FAMILIES)]


def tiny_module(family: str = "llama", seed: int = 1, **settings: Any) -> PreTrainedModel:
    """Return a module with random weights, as a trainer would load it but without dropout."""
    model_type, own = (EXACT | HYBRID)[family]
    config = config_of(model_type, **{**own, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Not sdpa, which drops the soft cap of gemma2.
        module: PreTrainedModel = auto_class(config).from_config(
            config, attn_implementation="eager"
        )
    spread_weights(module, seed)
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if (name == "p" or "drop" in name) and isinstance(value, float):
                setattr(part, name, 0.0)
    return module.train()


def weights_of(tree: RolloutTree, starts: Sequence[int]) -> list[Tensor]:
    """Return a random factor of the loss for each scored token."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(max(0, len(tree.text(sample)) - start), generator=generator)
        for sample, start in enumerate(starts)
    ]


def loss_of(logprobs: Sequence[Tensor], factors: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a * b).sum() for a, b in zip(logprobs, factors, strict=True)]).sum()


def stock_logprobs(
    module: Any, tree: RolloutTree, starts: Sequence[int], temperature: float = 1.0
) -> list[Tensor]:
    """Return the log-probabilities of each sample from a pass over this sample alone."""
    result = []
    for sample, start in enumerate(starts):
        ids = torch.tensor([tree.text(sample)], dtype=torch.int64, device=module.device)
        if ids.shape[1] <= start:
            result.append(torch.zeros(0, device=module.device))
            continue
        logits = module(input_ids=ids, use_cache=False).logits[0].float() / temperature
        logprobs = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        result.append(logprobs[start - 1 :])
    return result


def gradients(module: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    module.zero_grad()
    loss.backward()
    return {
        name: weight.grad.clone()
        for name, weight in module.named_parameters()
        if weight.grad is not None and weight.grad.any()
    }


def compare(
    module: Any,
    tree: RolloutTree,
    prompt_lengths: Sequence[int] | None = None,
    temperature: float = 1.0,
    limit: float = 1e-5,
) -> None:
    """Compare log-probabilities and the gradient of every weight."""
    starts = prompt_lengths or [1] * len(tree.last)
    factors = weights_of(tree, starts)
    got = tree_logprobs(module, tree, prompt_lengths=prompt_lengths, temperature=temperature)
    tree_gradients = gradients(module, loss_of(got, factors))
    want = stock_logprobs(module, tree, starts, temperature)
    expected = gradients(module, loss_of(want, factors))
    for actual, stock in zip(got, want, strict=True):
        torch.testing.assert_close(actual, stock, atol=1e-5, rtol=1e-5)
    assert tree_gradients.keys() == expected.keys() and tree_gradients
    total = torch.stack([stock.norm() for stock in expected.values()]).norm()
    for name, stock in expected.items():
        # Without RoPE, a bias of keys changes nothing: its gradient is 0, but for rounding.
        scale = stock.norm() if stock.norm() > 1e-5 * total else total
        error = (tree_gradients[name] - stock).norm() / scale
        assert error < limit, f"{name}: {error:.1e}"


@pytest.mark.parametrize(("family", "depth", "seed"), CASES, ids=FAMILIES.keys())
def test_gradients_are_those_of_single_samples(family: str, depth: int, seed: int) -> None:
    if not known(EXACT[family][0]):
        pytest.skip(f"this transformers has no {EXACT[family][0]}")
    compare(tiny_module(family), random_tree(seed, depth=depth))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma2"])
def test_gradients_on_a_gpu_are_those_of_a_cpu(family: str) -> None:
    module, tree = tiny_module(family), random_tree(5, depth=4)
    starts = [1] * len(tree.last)
    factors = weights_of(tree, starts)
    want = tree_logprobs(module, tree)
    expected = gradients(module, loss_of(want, factors))
    got = [logprobs.cpu() for logprobs in tree_logprobs(module.cuda(), tree)]
    actual = gradients(module, loss_of(got, factors))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert actual.keys() == expected.keys() and actual
    total = torch.stack([stock.norm() for stock in expected.values()]).norm()
    for name, stock in expected.items():
        assert (actual[name].cpu() - stock).norm() < 1e-4 * max(stock.norm(), 1e-2 * total), name


def bfloat16_errors(module: Any, tree: RolloutTree, device: str) -> tuple[float, float]:
    """Errors of gradients under autocast, relative to their size: the tree's and stock's."""
    starts = [1] * len(tree.last)
    factors = weights_of(tree, starts)
    exact = gradients(module, loss_of(stock_logprobs(module, tree, starts), factors))
    module.to(device)

    def error_of(logprobs: Callable[[], list[Tensor]]) -> float:
        with torch.autocast(device, torch.bfloat16):
            values = [value.cpu() for value in logprobs()]
        assert all(each.dtype == torch.float32 for each in values)
        rounded = gradients(module, loss_of(values, factors))
        pairs = [(rounded[name].cpu() - exact[name], exact[name]) for name in exact]
        gap, size = (torch.stack([p[at].norm() for p in pairs]).norm() for at in (0, 1))
        return float(gap / size)

    return (
        error_of(lambda: tree_logprobs(module, tree)),
        error_of(lambda: stock_logprobs(module, tree, starts)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gpt_oss", "gemma2", "mistral_swa"])
def test_16_bits_on_a_gpu_are_as_close_as_stock_attention(family: str) -> None:
    own, stock = bfloat16_errors(tiny_module(family), random_tree(5, depth=4), "cuda")
    assert own < 1.5 * stock < 0.3


@pytest.mark.parametrize("tree", degenerate_trees().values(), ids=degenerate_trees().keys())
def test_gradients_of_degenerate_trees(tree: RolloutTree) -> None:
    compare(tiny_module("gemma2"), tree)


def test_tied_embeddings_get_the_gradients_of_both_uses() -> None:
    module = tiny_module(tie_word_embeddings=True)
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight
    compare(module, random_tree(1, depth=4))


def test_chunks_without_scaled_queries_train() -> None:
    module = tiny_module("llama4", attn_temperature_tuning=False)
    compare(module, random_tree(5, depth=4))


def test_dropout_read_from_the_configuration_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = tiny_module()
    monkeypatch.setattr(trainable, "_check_dropout", lambda module: None)
    module.model.layers[1].self_attn.attention_dropout = 0.1
    before = module.config._attn_implementation
    with pytest.raises(ModelError, match=r"LlamaAttention.*dropout 0\.1"):
        tree_logprobs(module, tree_of([[5, 6, 7], [5, 8]]))
    assert module.config._attn_implementation == before


def test_prompts_and_temperature_as_in_grpo() -> None:
    tree = tree_of([[5, 6, 7, *after] for after in ([8, 9], [8, 10, 11], [], [12], [8, 9])])
    compare(tiny_module(), tree, prompt_lengths=[3] * 5, temperature=0.7)
    first, _, third, _, last = tree_logprobs(tiny_module(), tree, prompt_lengths=[3] * 5)
    assert third.shape == (0,) and torch.equal(first, last)


def test_a_batch_without_tokens_to_score_is_empty() -> None:
    assert tree_logprobs(tiny_module(), tree_of([])) == []
    assert tree_logprobs(tiny_module(), RolloutTree((Segment((5,), None, ()),), ())) == []
    (none,) = tree_logprobs(tiny_module(), tree_of([[]]))
    none.sum().backward()
    module = tiny_module()
    values = tree_logprobs(module, tree_of([[5, 6], [5, 7, 8]]), prompt_lengths=[2, 3])
    assert [each.shape for each in values] == [(0,), (0,)] == [none.shape] * 2
    torch.cat(values).sum().backward()
    # Each weight has a gradient, so that DDP and FSDP exchange those of other ranks.
    assert all(weight.grad is not None for weight in module.parameters())
    assert not any(weight.grad.any() for weight in module.parameters())


class Recomputed:
    """Counts how often the layers of a module run."""

    def __init__(self, module: Any) -> None:
        self.count = 0
        for layer in module.model.layers:
            layer.self_attn.register_forward_pre_hook(self._add)

    def _add(self, *_: Any) -> None:
        self.count += 1


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_runs_the_layers_again_over_the_tree(use_reentrant: bool) -> None:
    module: Any = tiny_module("gemma2")
    tree = random_tree(8, depth=4)
    factors = weights_of(tree, [1] * len(tree.last))
    want = gradients(module, loss_of(tree_logprobs(module, tree), factors))
    module.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        module.enable_input_require_grads()
    recomputed = Recomputed(module)
    loss = loss_of(tree_logprobs(module, tree), factors)
    assert recomputed.count == 4
    got = gradients(module, loss)
    assert recomputed.count == 8
    assert all(torch.equal(got[name], want[name]) for name in want)
    compare(module, tree)  # stock passes still run stock attention, checkpointed or not


def test_bfloat16_autocast_is_as_close_as_stock_autocast() -> None:
    own, stock = bfloat16_errors(tiny_module(), random_tree(4, depth=3), "cpu")
    assert own < 1.5 * stock < 0.2


def test_weights_in_bfloat16_train() -> None:
    module = tiny_module().bfloat16()
    tree = random_tree(4, depth=3)
    loss = torch.cat(tree_logprobs(module, tree)).sum()
    assert gradients(module, loss) and loss.isfinite()


def test_the_module_is_left_as_it_was() -> None:
    module = tiny_module("deepseek_v3")
    module.model.layers[0].requires_grad_(False)

    def state() -> list[Any]:
        parts = [(type(part), part.training, sorted(vars(part))) for part in module.modules()]
        needs = [weight.requires_grad for weight in module.parameters()]
        return [parts, needs, module.config._attn_implementation]

    before = state()
    torch.cat(tree_logprobs(module, random_tree(2, depth=2))).sum().backward()
    assert state() == before
    with pytest.raises(ContextError):
        tree_logprobs(module, tree_of([[5] * 300]))
    assert state() == before


def test_adapters_train() -> None:
    peft = pytest.importorskip("peft")
    base = tiny_module()
    module = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    for name, weight in module.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
    compare(module, random_tree(9, depth=3))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(InputError, match="prompt learning adapters"):
        tree_logprobs(peft.get_peft_model(tiny_module(), prompts), tree_of([[5, 6]]))


def saved_bytes(run: Any) -> int:
    """Return the bytes that autograd keeps for the backward pass, without the weights."""
    stored: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        base = tensor._base if tensor._is_view() else tensor
        if not isinstance(base, nn.Parameter):
            stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in stored.values())


def test_memory_follows_distinct_tokens() -> None:
    """The tree has a quarter of the tokens of the repeated prompts."""
    module: Any = tiny_module()
    module.set_attn_implementation("sdpa")
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 320, (160,), generator=generator).tolist()
    ends = torch.randint(3, 320, (8, 20), generator=generator).tolist()
    tree = tree_of([prompt + end for end in ends])
    batch = torch.tensor([prompt + end for end in ends])
    assert 4 < batch.numel() / tree.num_tokens < 5
    actual = saved_bytes(lambda: tree_logprobs(module, tree, prompt_lengths=[160] * 8))
    expected = saved_bytes(
        lambda: module(input_ids=batch, use_cache=False, logits_to_keep=21).logits.log_softmax(-1)
    )
    assert actual < expected / 3


def test_a_compiled_module_gives_the_same_gradients() -> None:
    module = tiny_module()
    want = gradients(module, torch.cat(tree_logprobs(module, random_tree(3, depth=2))).sum())
    compiled: Any = torch.compile(module, backend="eager")
    got = gradients(module, torch.cat(tree_logprobs(compiled, random_tree(3, depth=2))).sum())
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_the_loss_of_a_router_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("the loss of the router was computed")

    monkeypatch.setattr(modeling_qwen3_moe, "load_balancing_loss_func", fail)
    tree = random_tree(3, depth=2)
    plain, routed = tiny_module("qwen3_moe"), tiny_module("qwen3_moe", output_router_logits=True)
    want = gradients(plain, torch.cat(tree_logprobs(plain, tree)).sum())
    got = gradients(routed, torch.cat(tree_logprobs(routed, tree)).sum())
    assert all(torch.equal(got[name], want[name]) for name in want)
    llm = LLM(from_module(routed), tokenizer=tiny_tokenizer(), memory="1MiB")
    (output,) = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=2))
    assert output.outputs[0].token_ids


def test_a_branch_at_every_token() -> None:
    """Short segments share blocks, and later tokens see some of a block's keys alone."""
    generator = torch.Generator().manual_seed(0)
    trunk = torch.randint(3, 160, (150,), generator=generator).tolist()
    tree = tree_of([[*trunk[:num], 160 + num] for num in range(1, 151)])
    assert len(tree.segments) > 290
    compare(tiny_module(), tree)
    compare(tiny_module("mistral_swa"), tree)


# --- refusals ------------------------------------------------------------------------------------


def refusals() -> Iterator[tuple[str, Any, str]]:
    llama, phimoe = tiny_module(), tiny_module("phimoe")
    llama.model.layers[1].self_attn.attention_dropout = 0.1
    phimoe.model.layers[0].mlp.router.router_jitter_noise = 0.01
    yield (
        "attention dropout",
        llama,
        r"layers\.1\.self_attn .*attention_dropout 0\.1.*set attention_dropout to 0",
    )
    yield "jitter", phimoe, r"router_jitter_noise 0\.01"
    gpt2 = tiny_module("gpt2")
    gpt2.transformer.drop.p = 0.2
    yield "a dropout layer", gpt2, r"transformer\.drop \(Dropout\) has p 0\.2.*eval\(\)"
    yield "recurrent layers", tiny_module("lfm2"), r"lfm2 .*recurrent layers \(conv\)"
    yield "selected keys", tiny_module("deepseek_v32"), "deepseek_v32 .*select keys"
    yield "scaled queries", tiny_module("llama4"), "llama4_text .*scale queries"
    quantized = tiny_module()
    quantized.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        torch.zeros(48, 32, dtype=torch.int8), requires_grad=False
    )
    yield "quantized weights", quantized, "quantized weights"
    spread: Any = tiny_module()
    spread.model.layers[1].to("meta")
    yield "weights on several devices", spread, "on one device, got cpu, meta.*without device_map"
    noisy: Any = tiny_module()
    noisy.model.embed_tokens.neftune_noise_alpha = 5
    yield "noise of embeddings", noisy, r"embed_tokens .*neftune_noise_alpha 5"


@pytest.mark.parametrize(
    ("module", "message"), [pytest.param(*case[1:], id=case[0]) for case in refusals()]
)
def test_modules_with_other_gradients_are_refused(module: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        tree_logprobs(module, tree_of([[5, 6, 7], [5, 8]]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["bloom", "falcon", "stablelm", "doge"])
def test_families_that_treegen_refuses_cannot_be_trained(family: str) -> None:
    model_type, settings = REFUSED[family]
    if not known(model_type):
        pytest.skip(f"this transformers has no {model_type}")
    config = config_of(model_type, **settings)
    with pytest.raises(ModelError, match=f"{model_type} models cannot be used"):
        tree_logprobs(auto_class(config).from_config(config), tree_of([[5, 6, 7], [5, 8]]))


def test_an_untested_family_is_compared_with_stock_attention(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainable, "is_tested", lambda model_type: False)
    compare(tiny_module("qwen3"), random_tree(1, depth=3))
    from treegen.model import load_check

    monkeypatch.setattr(load_check, "_error_and_limit", lambda model: (1.0, 0.1))
    with pytest.raises(ModelError, match="differ from those with transformers' own attention"):
        tree_logprobs(tiny_module("qwen3"), tree_of([[5, 6]]))


BAD_INPUT: dict[str, tuple[Any, RolloutTree, dict[str, Any], str]] = {
    "no model": (nn.Linear(2, 2), tree_of([[5, 6]]), {}, "got Linear"),
    "a token beyond the vocabulary": (None, tree_of([[5, 999]]), {}, "token 999.*0 to 319"),
    "too few prompt lengths": (
        None,
        tree_of([[5, 6]]),
        {"prompt_lengths": []},
        "each of the 1 samples, got 0",
    ),
    "a prompt length of 0": (None, tree_of([[5, 6]]), {"prompt_lengths": [0]}, "at least 1"),
    "a prompt that is too long": (None, tree_of([[5, 6]]), {"prompt_lengths": [3]}, "at most 2"),
    "a temperature of 0": (None, tree_of([[5, 6]]), {"temperature": 0}, "temperature"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_an_error(case: str) -> None:
    module, tree, arguments, message = BAD_INPUT[case]
    with pytest.raises(InputError, match=message):
        tree_logprobs(module or tiny_module(), tree, **arguments)


def test_the_public_module() -> None:
    from treegen.train import RolloutTree as PublicTree
    from treegen.train import tree_logprobs as public

    assert public is tree_logprobs and PublicTree is RolloutTree
    assert treegen.train.tree_of is tree_of


def test_malformed_trees_are_errors() -> None:
    with pytest.raises(InputError, match="parents before"):
        RolloutTree((Segment((5,), 1, ()), Segment((6,), None, ())), (0,))
    with pytest.raises(InputError, match="ends in segment 1, but the tree has 1"):
        RolloutTree((Segment((5,), None, ()),), (1,))
    for tokens in ((5, 6.5), ("a",), (5, (6,)), (True,), (-1,), 5):
        with pytest.raises(InputError, match=r"segment 0 of the tree (must be|has token ids)"):
            RolloutTree((Segment(tokens, None, ()),), (0,))  # type: ignore[arg-type]
    for parent in ("0", 0.0, False, torch.tensor(False)):
        with pytest.raises(InputError, match="the parent of segment 1 must be an integer"):
            RolloutTree((Segment((5,), None, ()), Segment((6,), parent, ())), (1,))  # type: ignore[arg-type]
    for last in (0.0, "0", None, False):
        with pytest.raises(InputError, match="an index in last must be an integer"):
            RolloutTree((Segment((5,), None, ()),), (last,))  # type: ignore[arg-type]


def test_integers_of_numpy_and_torch_are_integers() -> None:
    module, prompt_lengths = tiny_module(), [2, 1]
    tree = tree_of([[5, 6, 7], [5, 8]])
    want = tree_logprobs(module, tree, prompt_lengths=prompt_lengths)
    lengths: list[Any] = [
        np.array(prompt_lengths),
        torch.tensor(prompt_lengths),
        list(np.array(prompt_lengths)),
        list(torch.tensor(prompt_lengths)),
    ]
    for each in lengths:
        for got, right in zip(tree_logprobs(module, tree, prompt_lengths=each), want, strict=True):
            assert torch.equal(got, right)
    for wrong in (True, np.True_, torch.tensor(True), 1.0, np.float32(1), torch.tensor(1.0), "1"):
        with pytest.raises(InputError, match=r"prompt_lengths\[1\] must be an integer"):
            tree_logprobs(module, tree, prompt_lengths=[2, wrong])  # type: ignore[list-item]


def test_new_tokens_of_a_module_can_be_scored() -> None:
    module, tree = tiny_module(), tree_of([[5, 6, 7], [5, 8]])
    tree_logprobs(module, tree)
    size = module.config.vocab_size
    module.resize_token_embeddings(size + 8)
    compare(module, tree_of([[5, 6, size + 1], [5, size + 7]]))
