"""The model, what it is optimized by, and the loss."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from train_demo.batches import Rows
from train_demo.tokenizer import CONTEXT

# Of a digit in the solution of a word problem, what is spread over all ten digits. It makes the
# model slip at times when it samples, each time elsewhere, as larger ones do on harder problems.
SMOOTHING: Final = 0.08


def _causal(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to everything before; [batch, heads, length, head size] -> [batch, length, ...]."""
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("packed_causal", _causal)


@dataclass(frozen=True, slots=True)
class Size:
    """Layers, and the width of them; there are four query heads on two key heads."""

    layers: int
    width: int
    head: int


DEMO: Final = Size(layers=6, width=256, head=64)
AGENT: Final = Size(layers=4, width=128, head=32)
TINY: Final = Size(layers=2, width=64, head=16)


def build_model(tokenizer: PreTrainedTokenizerFast, size: Size) -> LlamaForCausalLM:
    """Return a Llama with random weights."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.head,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    config._attn_implementation = "packed_causal"
    return LlamaForCausalLM(config)


def optimizers(model: LlamaForCausalLM, device: torch.device) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    matrix_ids = {id(p) for p in matrices}
    remaining = [p for p in model.parameters() if id(p) not in matrix_ids]
    return [
        torch.optim.Muon(matrices, lr=3e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            remaining, lr=3e-3, betas=(0.9, 0.98), weight_decay=0.0, fused=device.type == "cuda"
        ),
    ]


def digit_tokens(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return the ids of the digits, [2, 10]: without and with a space before them."""
    texts = [[f"{space}{digit}" for digit in range(10)] for space in ("", " ")]
    return torch.tensor(
        [[tokenizer.encode(x, add_special_tokens=False)[0] for x in row] for row in texts]
    )


def loss_of(model: LlamaForCausalLM, rows: Rows, digits: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the next token, by the weights of the tokens."""
    hidden = model.model(input_ids=rows.tokens[:, :-1], use_cache=False).last_hidden_state
    logits = model.lm_head(hidden).flatten(0, 1).float()
    targets = rows.tokens[:, 1:].flatten()
    losses = F.cross_entropy(logits, targets, reduction="none")
    # Label smoothing: the mean loss of all ten digits of the kind that the target is one of.
    kinds = (targets[:, None, None] == digits).any(-1)
    spread = logits.logsumexp(-1, keepdim=True) - logits[:, digits].mean(-1)
    smoothed = (1 - SMOOTHING) * losses + SMOOTHING * (spread * kinds).sum(-1)
    losses = torch.where(rows.smooth[:, 1:].flatten() & kinds.any(-1), smoothed, losses)
    weights = rows.weights[:, 1:].flatten().float()
    return (losses * weights).sum() / weights.sum()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the checkpoint, in bfloat16."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    copy.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
