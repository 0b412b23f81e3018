"""Compiles grammars in a separate process; see treegen.prompts.grammars.

It imports nothing of treegen.
"""

from collections.abc import Callable

from llguidance import LLMatcher


def prepare(setup: None) -> Callable[[str], bool]:
    """Return the function that answers requests."""
    return compile_grammar


def compile_grammar(grammar: str) -> bool:
    """Compile a grammar in llguidance's form, and return True also if llguidance rejects it."""
    LLMatcher.validate_grammar(grammar)
    return True
