"""The task capitals: which of four cities is a country's capital, by likelihood.

A task whose problems have choices draws no samples: after each prompt, the most likely of the
choices is the answer.
"""

from collections.abc import Sequence
from typing import Final

from treegen import Node, SamplingParams
from treegen.tasks import (
    Problem,
    Report,
    ReportOptions,
    SampleScore,
    Task,
    TaskData,
    TaskDefaults,
    TaskOptions,
    Verdict,
    select,
    summarize,
)

# The capital comes first; what the model sees is in alphabetical order.
_CITIES: Final = {
    "Australia": ("Canberra", "Sydney", "Melbourne", "Perth"),
    "Brazil": ("Brasilia", "Rio de Janeiro", "Sao Paulo", "Salvador"),
    "Canada": ("Ottawa", "Toronto", "Montreal", "Vancouver"),
    "Morocco": ("Rabat", "Casablanca", "Marrakesh", "Tangier"),
    "Switzerland": ("Bern", "Zurich", "Geneva", "Basel"),
    "Turkey": ("Ankara", "Istanbul", "Izmir", "Bursa"),
}


class Capitals(Task):
    """Capitals that are not the largest city of their country."""

    name: Final = "capitals"
    version: Final = "1"
    filters: Final = ("none",)
    defaults: Final = TaskDefaults(
        sampling=SamplingParams(temperature=0.0, max_tokens=1), num_samples=1, num_fewshot=0
    )

    def load(self, options: TaskOptions) -> TaskData:
        """Return a problem per country."""
        problems = [
            Problem(
                country.lower(),
                f"The capital of {country} is",
                cities[0],
                choices=tuple(f" {city}" for city in sorted(cities)),
            )
            for country, cities in _CITIES.items()
        ]
        return TaskData(problems=select(problems, options), source="treegen-capitals")

    def tree(self, data: TaskData, num_samples: int) -> Node:
        """Return a node per problem; its choices are not part of the tree."""
        nodes = [Node(p.question, samples=num_samples, id=p.id) for p in data.problems]
        return Node("", children=nodes)

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return whether the most likely city is the capital."""
        city = text.strip()
        return {"none": Verdict(city, city == problem.answer)}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return accuracy."""
        return summarize(
            scores, options, task=self.name, version=self.version, filters=self.filters
        )
