"""Run jobs by vLLM: `python examples/peers/run_vllm.py JOB DIR`, in an environment with vllm.

As vLLM runs by default, but for CUDA graphs of as many rows as it may run: its own limit is 512.
"""

import os
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, SamplingParams
from workload import arguments, has_weights, jobs_of, measure, most, run_job, versions_of


def main() -> None:
    """Start the engine, run the jobs and print their tables."""
    parser = arguments()
    parser.add_argument("--memory", type=float, default=0.92, help="gpu_memory_utilization")
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--max-rows", type=int, default=1024, help="max_num_seqs at most")
    parser.add_argument("--graph-rows", type=int, help="rows of a CUDA graph; default: all")
    options = parser.parse_args()
    jobs = jobs_of(options.jobs)
    rows, longest = most(jobs)
    rows = min(rows, options.max_rows)
    settings: dict[str, Any] = {
        "enable_prefix_caching": True,
        "max_num_seqs": rows,
        "max_num_batched_tokens": options.batched_tokens,
        "max_model_len": longest + 1,
        "max_cudagraph_capture_size": options.graph_rows or rows,
        "gpu_memory_utilization": options.memory,
        "load_format": "auto" if has_weights(options.checkpoint) else "dummy",
    }
    llm = LLM(
        model=str(options.checkpoint),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        seed=0,
        **settings,
    )

    def generate(prompts: list[list[int]], samples: int, new: int) -> list[list[list[int]]]:
        params = SamplingParams(
            n=samples, max_tokens=new, temperature=1.0, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = llm.generate(asked, params, use_tqdm=False)
        return [[[*each.token_ids] for each in request.outputs] for request in done]

    measure(
        "vLLM",
        versions_of("vllm", "torch", "transformers"),
        settings,
        jobs,
        options,
        lambda job, run: run_job(job, run, generate),
    )


if __name__ == "__main__":
    main()
