"""Run jobs by SGLang: `python examples/peers/run_sglang.py JOB DIR`, where sglang is installed.

SGLang runs with its defaults, except for the options below and for CUDA graphs that cover all
rows: its own limit is 256.
"""

from typing import Any

import sglang
from workload import arguments, find_max_sizes, has_weights, jobs_of, measure, run_job, versions_of

RESOLVED = ("attention_backend", "sampling_backend", "chunked_prefill_size", "schedule_policy")
"""Arguments whose values SGLang chooses if nobody sets them."""


def main() -> None:
    """Start the engine, run the jobs and print their tables."""
    parser = arguments()
    parser.add_argument("--memory", type=float, default=0.88, help="mem_fraction_static")
    parser.add_argument("--max-rows", type=int, default=1024, help="max_running_requests at most")
    parser.add_argument("--attention", help="attention_backend; SGLang takes fa3 on Hopper GPUs")
    parser.add_argument(
        "--prefill-first",
        action="store_true",
        help="compute all prompts of a call together; by default, SGLang computes them one by one",
    )
    parser.add_argument("--log", default="error", help="log_level")
    options = parser.parse_args()
    jobs = jobs_of(options.jobs, options.tokens, kinds=("draw",))
    rows, longest = find_max_sizes(jobs)
    rows = min(rows, options.max_rows)
    settings: dict[str, Any] = {
        "disable_radix_cache": False,
        "max_running_requests": rows,
        "cuda_graph_max_bs_decode": rows,
        "mem_fraction_static": options.memory,
        "context_length": longest + 8,
        "load_format": "auto" if has_weights(options.checkpoint) else "dummy",
    }
    if options.attention:
        settings["attention_backend"] = options.attention
    engine = sglang.Engine(
        model_path=str(options.checkpoint),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        random_seed=0,
        log_level=options.log,
        **settings,
    )
    settings |= {name: getattr(engine.server_args, name) for name in RESOLVED}
    settings["prefill_first"] = options.prefill_first

    def draw(prompts: list[list[int]], new: int, samples: int = 1) -> list[list[int]]:
        params = {"n": samples, "max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
        done = engine.generate(input_ids=prompts, sampling_params=params)
        return [[*output["output_ids"]] for output in done]

    def generate(prompts: list[list[int]], samples: int, new: int) -> list[list[list[int]]]:
        # A prompt's samples follow each other, in the order of the prompts.
        if options.prefill_first and samples > 1:
            draw(prompts, 0)
            rows = draw([prompt for prompt in prompts for _ in range(samples)], new)
        else:
            rows = draw(prompts, new, samples)
        return [rows[at : at + samples] for at in range(0, len(rows), samples)]

    measure(
        "SGLang",
        versions_of("sglang", "sglang-kernel", "torch", "transformers"),
        settings,
        jobs,
        options,
        lambda job, run: run_job(job, run, generate),
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
