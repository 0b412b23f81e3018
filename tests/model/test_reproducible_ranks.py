"""Four processes that compute a reproducible model together add up their outputs in one order."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import tiny_models
from engine_cases import FEW_SHOT, tree_of
from forked_ranks import forked_group
from gathering_ranks import add_in_fixed_order

from treegen import LLM, Node, SamplingParams
from treegen.model.load import load_model


def test_four_reproducible_ranks_depend_on_nothing_else(tmp_path: Path) -> None:
    """The order in which a library adds up four numbers depends on where they are in a tensor."""
    sizes: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4}
    tiny_models.save_tiny_model(tmp_path, hidden_size=64, intermediate_size=64, **sizes)
    leaves = tree_of(3).children
    found: list[dict[Any, Any]] = []
    with forked_group(4) as group:
        checked: Any = group.load(add_in_fixed_order)
        assert all(checked)
        model = group.load(partial(load_model, str(tmp_path)))
        for part, max_rows in ((leaves, 16), (leaves[1:], 4)):
            llm = LLM(
                model,
                tokenizer=tiny_models.tiny_tokenizer(),
                memory="4MiB",
                reproducible=True,
                max_rows=max_rows,
            )
            done = llm.run(Node(FEW_SHOT, children=part), SamplingParams(max_tokens=8, seed=3))
            found.append({(c.prompt_id, c.sample_index): c.tokens for c in done.completions})
    assert found[1] == {key: found[0][key] for key in found[1]}
