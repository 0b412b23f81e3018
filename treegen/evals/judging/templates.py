"""Prompts of rubrics: Jinja in a sandbox, and the order of fields, by which prompts share."""

from collections.abc import Mapping, Sequence
from typing import Final

from treegen.common.bounded.templates import TemplateError, render_rubric
from treegen.errors import InputError

FIELDS: Final = ("question", "reference", "answer", "answer_a", "answer_b", "criterion")
"""What a template may show. One further to the right differs more often."""


class RubricTemplate:
    """One wording of a rubric.

    source: the Jinja text. fields: the fields that it shows, each once, in the order in which their
    text comes first.
    """

    def __init__(self, source: str, name: str) -> None:
        """Render a template once, to see its fields; name: for messages.

        Raises:
            InputError: it is no Jinja, names a field that there is not, or takes too long.
        """
        self.source, self._name = source, name
        places = {field: f"\0{field}\0" for field in FIELDS}
        try:
            shown = render_rubric(source, places)
        except TemplateError as error:
            raise InputError(
                f"{name} is no template that can be filled in: {error}; it may use "
                f"{', '.join(FIELDS)}"
            ) from None
        found = {field: shown.find(place) for field, place in places.items()}
        there = [field for field in FIELDS if found[field] >= 0]
        self.fields: tuple[str, ...] = tuple(sorted(there, key=found.__getitem__))

    def render(self, values: Mapping[str, str]) -> str:
        """Return the prompt with values for fields.

        Raises:
            InputError: the template asks for more than there is, or takes too long.
        """
        try:
            return render_rubric(self.source, values).strip("\n")
        except TemplateError as error:
            raise InputError(
                f"{self._name} cannot be filled in: {error}; mend the template"
            ) from None

    def find_misplaced(self) -> str:
        """Return what keeps prompts from sharing all that they could; empty if nothing does.

        Prompts share what stands before the first difference. So a field that is the same for
        many prompts belongs before one that differs more often.
        """
        ranks = [FIELDS.index(field) for field in self.fields]
        for place, (field, rank) in enumerate(zip(self.fields, ranks, strict=True)):
            late = [self.fields[i] for i in range(place + 1, len(ranks)) if ranks[i] < rank]
            if late:
                return (
                    f"{self._name} shows {field} before {' and '.join(late)}, so what follows "
                    f"{field} is computed for each one apart; move {field} behind it"
                )
        return ""


def check_fields(templates: Sequence[RubricTemplate], needed: Sequence[str], name: str) -> None:
    """Raise InputError unless every template shows some fields."""
    for number, template in enumerate(templates):
        if lacking := [field for field in needed if field not in template.fields]:
            raise InputError(
                f"wording {number + 1} of the rubric {name} does not show {', '.join(lacking)}; "
                f"write {{{{ {lacking[0]} }}}} where it belongs"
            )
