"""Advice for scripts that import classes and modules of vLLM from treegen.

`from treegen import X` replaces the message of an AttributeError by its own, unless the import of
a module `treegen.X` fails with another error. `ForeignImports` raises this error, with advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

_NO_EMBEDDINGS: Final = "embeddings are not supported; use vLLM or sentence-transformers"
_SCORES: Final = "llm.score returns a list of treegen.Score"
_PROMPT: Final = "a prompt is text, token ids, chat messages or a dict, without a class"
_CLASSES: Final = {
    "AsyncEngineArgs": "pass the options to LLM, and the LLM to AsyncLLM",
    "AsyncLLMEngine": "use AsyncLLM(LLM(model))",
    "BeamSearchParams": "use llm.search with treegen.search.beam",
    "ClassificationOutput": _SCORES,
    "ClassificationRequestOutput": _SCORES,
    "CompletionOutput": "use treegen.Completion, which has the same fields",
    "DataPrompt": _PROMPT,
    "EmbeddingOutput": _NO_EMBEDDINGS,
    "EmbeddingRequestOutput": _NO_EMBEDDINGS,
    "EmbedsPrompt": _NO_EMBEDDINGS,
    "EngineArgs": "pass the options to LLM",
    "FlatLogprobs": "Completion.logprobs has one number per token",
    "FlexibleArgumentParser": "use argparse.ArgumentParser",
    "GuidedDecodingParams": 'use SamplingParams(structured_outputs={"choice": [...]})',
    "LLMEngine": "use LLM, or use AsyncLLM for requests that arrive at any time",
    "LoRARequest": "load the adapter with LLM(model, adapter=DIR)",
    "Logprob": "Completion.logprobs has one number per token",
    "ModelRegistry": "pass a model of your own to treegen.from_module",
    "PoolingOutput": _NO_EMBEDDINGS,
    "PoolingParams": _NO_EMBEDDINGS,
    "PoolingRequestOutput": _NO_EMBEDDINGS,
    "PromptType": _PROMPT,
    "RepetitionDetectionParams": (
        "repetitions do not end samples; use repetition_penalty, frequency_penalty or "
        "no_repeat_ngram_size of SamplingParams"
    ),
    "RequestOutputKind": (
        "LLM.generate returns finished samples, LLM.stream yields samples as they finish, and "
        "AsyncLLM.stream yields deltas"
    ),
    "SamplingType": "temperature=0.0 of SamplingParams is greedy, and any other samples",
    "ScoringOutput": _SCORES,
    "ScoringRequestOutput": _SCORES,
    "TextPrompt": 'pass the text, or {"prompt": text}',
    "TokensPrompt": 'pass the token ids, or {"prompt_token_ids": ids}',
    "initialize_ray_cluster": "use treegen.Cluster, which starts Ray itself",
}
"""Classes and functions of vLLM that treegen does not have, with advice."""
_MODULES: Final = {
    "treegen.beam_search": "use llm.search with treegen.search.beam",
    "treegen.config": "pass the options to LLM",
    "treegen.distributed": "use treegen.Cluster, or tensor_parallel_size of LLM",
    "treegen.engine.arg_utils": "pass the options to LLM",
    "treegen.engine.async_llm_engine": "import AsyncLLM from treegen",
    "treegen.engine.llm_engine": "import LLM from treegen",
    "treegen.entrypoints": "import LLM from treegen; `treegen serve` is the server",
    "treegen.inputs": _PROMPT,
    "treegen.logprobs": "Completion.logprobs has one number per token",
    "treegen.lora": "load the adapter with LLM(model, adapter=DIR)",
    "treegen.multimodal": "pass images as parts of chat messages to llm.chat",
    "treegen.outputs": "import RequestOutput, Completion or Score from treegen",
    "treegen.pooling_params": _NO_EMBEDDINGS,
    "treegen.sampling_params": "import SamplingParams or StructuredOutputsParams from treegen",
    "treegen.transformers_utils": "use transformers; llm.tokenizer is the tokenizer",
    "treegen.utils": "treegen has none of vLLM's utilities; use argparse and the standard library",
    "treegen.v1": "import AsyncLLM from treegen",
}
"""Modules of vLLM, by the names that they would have in treegen, with advice."""


def check_attribute(name: str) -> None:
    """Raise MissingNameError if an attribute of treegen is a class of vLLM, and say what to use."""
    if name in _CLASSES:
        from treegen.errors import MissingNameError

        raise MissingNameError(f"treegen has no {name}: {_CLASSES[name]}")


class ForeignImports:
    """An entry at the end of `sys.meta_path` that raises errors with advice for names of vLLM."""

    @staticmethod
    def find_spec(
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Raise an ImportError with advice for a name of vLLM; return None for all others.

        Args:
            name: The full name of the module.
            path: The directories of the package; not used.
            target: The module to reload; not used.

        Raises:
            MissingImportError: the name is a class of vLLM, as in `from treegen import EngineArgs`.
            MissingModuleError: the name is a module of vLLM.
        """
        package, _, last = name.rpartition(".")
        if package == "treegen" and last in _CLASSES:
            from treegen.errors import MissingImportError

            raise MissingImportError(f"treegen has no {last}: {_CLASSES[last]}")
        if name in _MODULES:
            from treegen.errors import MissingModuleError

            error = MissingModuleError(f"there is no module {name}: {_MODULES[name]}")
            error.name = name
            raise error
        return None
