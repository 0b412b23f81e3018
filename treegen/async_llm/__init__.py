"""One LLM for many callers at once, each of whom waits in an event loop.

Three kinds of threads meet here. Callers await in their event loops. One thread encodes prompts, in
the order in which they come. One thread owns the LLM: between two steps it takes what has come, and
after a step it hands out what has ended.

async_llm.py   what callers call, and how much may wait
encoder.py     the thread that encodes
stepper.py     the thread that owns the LLM
call.py        one call on its way through them
"""

from treegen.async_llm.async_llm import AsyncLLM as AsyncLLM
