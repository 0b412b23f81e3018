"""Run a job by transformers: `python examples/peers/run_transformers.py JOB DIR [--continuous]`.

`generate` computes a prompt once per sample; `--batch` limits how many prompts go into one call.
Continuous batching (`generate_batch`) shares blocks of equal prompts.
"""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging
from workload import (
    arguments,
    config_of,
    find_max_sizes,
    has_weights,
    jobs_of,
    measure,
    run_job,
    versions_of,
)


def main() -> None:
    """Load the model, run the job and print the table."""
    parser = arguments()
    parser.add_argument("--continuous", action="store_true", help="continuous batching")
    parser.add_argument("--batch", type=int, default=8, help="prompts in a call of generate")
    parser.add_argument("--attention", default="sdpa", help="attn_implementation")
    options = parser.parse_args()
    logging.set_verbosity_error()
    jobs = jobs_of(options.jobs, options.tokens, kinds=("draw",))
    max_rows, longest = find_max_sizes(jobs)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = getattr(torch, options.dtype)
    if has_weights(options.checkpoint):
        model: Any = AutoModelForCausalLM.from_pretrained(
            options.checkpoint, dtype=kind, attn_implementation=options.attention
        ).to(device)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(
                config_of(jobs[0].shape), dtype=kind, attn_implementation=options.attention
            )
    model.eval()

    def settings_of(new_tokens: int, samples: int) -> GenerationConfig:
        return GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            num_return_sequences=samples,
            eos_token_id=-1,  # no token: samples run to their full length
            pad_token_id=0,
        )

    def generate(prompts: list[list[int]], samples: int, new: int) -> list[list[list[int]]]:
        out = []
        for first in range(0, len(prompts), options.batch):
            ids = torch.tensor(prompts[first : first + options.batch], device=device)
            output = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=settings_of(new, samples),
            )
            rows = output[:, ids.shape[1] :].tolist()
            out += [rows[at : at + samples] for at in range(0, len(rows), samples)]
        return out

    # On a CPU it would take nearly all memory; this is enough for samples that share nothing.
    # transformers up to 5.17 calls the size of a page `block_size`.
    named = "page_size" in ContinuousBatchingConfig.__dataclass_fields__
    pages = (
        {}
        if device == "cuda"
        else {
            "page_size" if named else "block_size": 32,
            "num_blocks": max_rows * (longest // 32 + 1) + 8,
            "max_batch_tokens": 512,
        }
    )

    def continuous(prompts: list[list[int]], samples: int, new: int) -> list[list[list[int]]]:
        # transformers 5.17's `generate_batch` returns only the first sample of each prompt.
        rows: dict[tuple[int, ...], list[list[int]]] = {tuple(prompt): [] for prompt in prompts}
        with model.continuous_batching_context_manager(
            generation_config=settings_of(new, samples),
            continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=True, **pages),
            block=True,
        ) as manager:
            manager.add_requests(inputs=prompts, max_new_tokens=new)
            missing = len(prompts) * samples
            while missing:
                output = manager.get_result(timeout=1)
                if output is None and not manager.is_running():
                    raise RuntimeError(f"continuous batching ended without {missing} samples")
                if output is not None and output.is_finished():
                    rows[tuple(output.prompt_ids)].append([*output.generated_tokens])
                    missing -= 1
        return [rows[tuple(prompt)] for prompt in prompts]

    settings: dict[str, Any] = {"attention": options.attention, "device": device}
    if options.continuous:
        settings |= {"allow_block_sharing": True, **pages}
    else:
        settings |= {"batch": options.batch}
    draw = continuous if options.continuous else generate
    measure(
        "transformers, continuous batching" if options.continuous else "transformers, generate",
        versions_of("transformers", "torch"),
        settings,
        jobs,
        options,
        lambda job, run: run_job(job, run, draw),
    )


if __name__ == "__main__":
    main()
