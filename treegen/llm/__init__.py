"""LLM: one model, its cache, and the calls that sample from it."""

from treegen.llm.llm import LLM

__all__ = ["LLM"]
