r"""AIME: problems of the American Invitational Mathematics Examination, answers 0 to 999.

Data: the problems belong to the Mathematical Association of America and do not come with treegen.
`hf` is HuggingFaceH4/aime_2024, math-ai/aime25 and MathArena/aime_2026; Maxwell-Jia/AIME_2024 and
opencompass/AIME2025 can be read too, and so can files with their columns. One row:

    {"ID": "2024-I-1", "Problem": "How many ...?", "Solution": "...", "Answer": 204}

The prompt is the problem and a line that asks for a boxed answer. Samples are drawn as for
DeepSeek-R1 (2025): 64 of each problem, temperature 0.6, top-p 0.95, at most 32,768 tokens.
"""

from typing import ClassVar, Final

from treegen.errors import InputError
from treegen.evals.arguments import words
from treegen.evals.task import TaskDefaults, TaskOptions
from treegen.tasks.aime.data import YEARS, load_problems
from treegen.tasks.common.text_task import REASONING, Loaded
from treegen.tasks.math.competition import Competition


class AIME(Competition):
    """AIME with 64 samples of each problem; the headline filter is math-verify's verdict."""

    name = "aime"
    groups = ("year",)
    arguments: ClassVar = {
        "year": "2024, 2025, 2026 or several with a comma; default: all that the data have"
    }
    defaults: Final = TaskDefaults(sampling=REASONING, num_samples=64, num_fewshot=0)

    def read(self, options: TaskOptions) -> Loaded:
        """Return the problems of the requested years."""
        years = words(options.extra, "year")
        for year in years:
            if options.data == "hf" and year not in YEARS:
                raise InputError(
                    f"hf has AIME of {', '.join(YEARS)}, not of {year!r}; "
                    "give one of these, or a file"
                )
        return load_problems(options.data, options.split, years)
