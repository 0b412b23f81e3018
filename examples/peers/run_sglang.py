"""Run a job by SGLang: `python examples/peers/run_sglang.py JOB DIR`, where sglang is installed."""

from typing import Any

import sglang
from workload import arguments, has_weights, jobs_of, measure, most, run_job, versions_of


def main() -> None:
    """Start the engine, run the job and print the table."""
    parser = arguments()
    parser.add_argument("--memory", type=float, default=0.88, help="mem_fraction_static")
    parser.add_argument("--max-rows", type=int, default=1024, help="max_running_requests at most")
    options = parser.parse_args()
    jobs = jobs_of(options.jobs, options.tokens, kinds=("draw",))
    rows, longest = most(jobs)
    settings: dict[str, Any] = {
        "disable_radix_cache": False,
        "max_running_requests": min(rows, options.max_rows),
        "mem_fraction_static": options.memory,
        "context_length": longest + 8,
        "load_format": "auto" if has_weights(options.checkpoint) else "dummy",
    }
    engine = sglang.Engine(
        model_path=str(options.checkpoint),
        skip_tokenizer_init=True,
        dtype=options.dtype,
        random_seed=0,
        **settings,
    )

    def generate(prompts: list[list[int]], samples: int, new: int) -> list[list[list[int]]]:
        params = {"n": samples, "max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
        done = engine.generate(input_ids=prompts, sampling_params=params)
        # A prompt's samples follow each other, in the order of the prompts.
        rows = [[*output["output_ids"]] for output in done]
        return [rows[at : at + samples] for at in range(0, len(rows), samples)]

    measure(
        "SGLang",
        versions_of("sglang", "torch"),
        settings,
        jobs,
        options,
        lambda job, run: run_job(job, run, generate),
    )
    engine.shutdown()


if __name__ == "__main__":
    main()
