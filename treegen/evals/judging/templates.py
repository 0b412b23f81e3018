"""Templates of rubrics: sandboxed Jinja, and the order of fields, on which sharing depends."""

from collections.abc import Mapping, Sequence
from typing import Final

from treegen.common.bounded.templates import TemplateError, render_rubric
from treegen.errors import InputError

FIELDS: Final = ("question", "reference", "answer", "answer_a", "answer_b", "criterion")
"""Fields that a template may show, ordered by how often they differ between prompts."""


class RubricTemplate:
    """One wording of a rubric.

    source: the Jinja text.
    fields: the fields that it shows, each once, in the order of their first occurrence.
    """

    def __init__(self, source: str, name: str) -> None:
        """Render a template once to find its fields.

        Args:
            source: The Jinja text.
            name: Name of the template in error messages.

        Raises:
            InputError: the text is not valid Jinja, uses an unknown field, or takes too long.
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
        position_of = {field: shown.find(place) for field, place in places.items()}
        there = [field for field in FIELDS if position_of[field] >= 0]
        self.fields: tuple[str, ...] = tuple(sorted(there, key=position_of.__getitem__))

    def render(self, values: Mapping[str, str]) -> str:
        """Return the prompt for these values of fields.

        Raises:
            InputError: the template uses a missing value, or takes too long.
        """
        try:
            return render_rubric(self.source, values).strip("\n")
        except TemplateError as error:
            raise InputError(
                f"{self._name} cannot be filled in: {error}; mend the template"
            ) from None

    def find_misplaced(self) -> str:
        """Return a sentence on fields in an order that reduces sharing; empty if the order is good.

        Prompts share the text before their first difference, so a field that is equal for many
        prompts belongs before a field that differs more often.
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
    """Raise InputError unless every template shows all needed fields.

    Args:
        templates: The wordings of a rubric.
        needed: Names of the fields that each template must show.
        name: Name of the rubric in the error message.
    """
    for number, template in enumerate(templates):
        if lacking := [field for field in needed if field not in template.fields]:
            raise InputError(
                f"wording {number + 1} of the rubric {name} does not show {', '.join(lacking)}; "
                f"write {{{{ {lacking[0]} }}}} where it belongs"
            )
