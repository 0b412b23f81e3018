"""Run jobs by vLLM: `python examples/peers/run_vllm.py JOB DIR`, in an environment with vllm.

vLLM runs with its defaults, except that its CUDA graphs cover all rows: its own limit is 512.
Options turn on what vLLM leaves off, or off what it leaves on.
"""

import os
from typing import Any

os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

from vllm import LLM, SamplingParams
from workload import (
    Job,
    arguments,
    find_max_sizes,
    has_weights,
    jobs_of,
    measure,
    run_job,
    score_job,
    versions_of,
)


def main() -> None:
    """Start the engine, run the jobs and print their tables."""
    parser = arguments()
    parser.add_argument("--memory", type=float, default=0.92, help="gpu_memory_utilization")
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--max-rows", type=int, default=1024, help="max_num_seqs at most")
    parser.add_argument("--graph-rows", type=int, help="rows of a CUDA graph; default: all")
    parser.add_argument(
        "--cascade",
        action="store_true",
        help="cascade attention, which only the older of vLLM 0.26's two model runners has",
    )
    parser.add_argument("--no-async", action="store_true", help="no asynchronous scheduling")
    parser.add_argument("--attention", help="attention_backend, such as FLASHINFER")
    parser.add_argument("--grammars", help="backend of structured outputs, such as guidance")
    parser.add_argument(
        "--read-prefix-cache",
        action="store_true",
        help="read the prefix cache when scoring: no log-probabilities for tokens found there",
    )
    options = parser.parse_args()
    if options.cascade:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    jobs = jobs_of(options.jobs, options.tokens)
    rows, longest = find_max_sizes(jobs)
    rows = min(rows, options.max_rows)
    settings: dict[str, Any] = {
        "enable_prefix_caching": True,
        "max_num_seqs": rows,
        "max_num_batched_tokens": options.batched_tokens,
        "max_model_len": longest + 1,
        "max_cudagraph_capture_size": options.graph_rows or rows,
        "gpu_memory_utilization": options.memory,
        "disable_cascade_attn": not options.cascade,
        "async_scheduling": not options.no_async,
        "load_format": "auto" if has_weights(options.checkpoint) else "dummy",
    }
    if options.attention:
        settings["attention_backend"] = options.attention
    if options.grammars:
        settings["structured_outputs_config"] = {"backend": options.grammars}
    llm = LLM(
        model=str(options.checkpoint),
        skip_tokenizer_init=all(job.kind != "structured" for job in jobs),
        dtype=options.dtype,
        seed=0,
        **settings,
    )

    def draw(
        prompts: list[list[int]], samples: int, new: int, **more: Any
    ) -> list[list[list[int]]]:
        params = SamplingParams(
            n=samples, max_tokens=new, temperature=1.0, detokenize=False, **more
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        done = llm.generate(inputs, params, use_tqdm=False)
        return [[[*output.token_ids] for output in request.outputs] for request in done]

    def generate(prompts: list[list[int]], samples: int, new: int) -> list[list[list[int]]]:
        return draw(prompts, samples, new, ignore_eos=True)

    def structured(job: Job, run: int) -> int:
        from vllm.sampling_params import StructuredOutputsParams

        outputs = StructuredOutputsParams(regex=job.pattern)
        return run_job(job, run, lambda *sizes: draw(*sizes, structured_outputs=outputs))

    def score(pairs: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        params = SamplingParams(
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            skip_reading_prefix_cache=not options.read_prefix_cache,
        )
        inputs = [{"prompt_token_ids": prompt + more} for prompt, more in pairs]
        done = llm.generate(inputs, params, use_tqdm=False)
        return [
            [
                numbers[token].logprob
                for numbers, token in zip(request.prompt_logprobs[-len(more) :], more, strict=True)
            ]
            for request, (_, more) in zip(done, pairs, strict=True)
        ]

    def work(job: Job, run: int) -> int:
        if job.kind == "score":
            return score_job(job, run, score)
        return structured(job, run) if job.kind == "structured" else run_job(job, run, generate)

    settings |= {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    measure("vLLM", versions_of("vllm", "torch", "transformers"), settings, jobs, options, work)


if __name__ == "__main__":
    main()
