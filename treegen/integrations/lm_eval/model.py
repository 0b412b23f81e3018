"""TreegenLM: lm-eval's model interface over an LLM.

All requests of a call become one tree: equal prefixes are computed once, and a prompt that occurs k
times is one node with k samples. Texts are tokenized, truncated and cut at stop strings as by
lm-eval's `hf`.
"""

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import fsum
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import resolve_max_length
from tqdm import tqdm

from treegen.common.checks import check_int
from treegen.common.version import VERSION
from treegen.errors import CapacityError, InputError, arg
from treegen.integrations.lm_eval.cached_responses import Journal, ResponseCache, SampledPrompt
from treegen.integrations.lm_eval.conversion import (
    GenSettings,
    gen_settings,
    image_tokens,
    load_images,
    with_images,
)
from treegen.integrations.lm_eval.tokenizer import (
    HarnessTokenizer,
    Pair,
    split_into_windows,
    truncate_context,
    truncate_prompt,
)
from treegen.llm import LLM
from treegen.llm.base import BaseLLM
from treegen.model.checkpoint.files import locate
from treegen.model.config import read_config
from treegen.model.options import check_known
from treegen.prompts.images.table import PlacedImage
from treegen.runs import model_identity
from treegen.runs.files import NewDirectory


class TreegenLM(TemplateLM):  # type: ignore[misc]
    """The model of `--model treegen`; its arguments are those of `--model_args`.

    Attributes:
        max_length: Maximum number of tokens of a prompt and its answer.
        max_gen_toks: Maximum number of tokens of an answer, if its request gives none.
    """

    eot_token_id: int | None = None
    """The token that ends a text."""
    prefix_token_id: int | None = None
    """The token that replaces an empty context."""
    tokenizer_name = ""
    """The name of the tokenizer and its chat template in lm-eval's request caches."""

    def __init__(  # noqa: PLR0913 -- lm-eval passes these by name
        self,
        pretrained: str | BaseLLM,
        *,
        cache: str | None = None,
        seed: int = 0,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | int | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        sampling: str = "neutral",
        batch_size: object = None,
        max_batch_size: object = None,
        **options: Any,
    ) -> None:
        """Load a model, or use an existing LLM.

        Args:
            pretrained: A directory, a hub name, "demo", an LLM or a Cluster.
            cache: Directory to store responses in as they arrive. A run that was stopped resumes
                from it when the same command is run again.
            seed: Seed of samples whose gen_kwargs have none.
            max_length: Maximum number of tokens of a prompt and its answer; by default as for
                lm-eval's `hf`.
            max_gen_toks: Maximum number of tokens of an answer, if gen_kwargs give none.
            add_bos_token: As for lm-eval's `hf`.
            prefix_token_id: As for lm-eval's `hf`.
            think_end_token: As for lm-eval's `hf`.
            enable_thinking: As for lm-eval's `hf`.
            chat_template_args: As for lm-eval's `hf`.
            sampling: Defaults for settings that gen_kwargs do not give: "neutral" applies no
                filters or penalties, as lm-eval's `vllm`; "recommended" uses
                generation_config.json, as its `hf`.
            batch_size: Without effect; use max_rows for the maximum number of samples at once.
            max_batch_size: Without effect; use max_rows for the maximum number of samples at once.
            **options: Options of LLM, such as dtype, device, memory or max_rows.

        Raises:
            InputError: An argument is unknown or has an invalid value.
            ModelError: As for LLM.
            CapacityError: As for LLM.
            RunError: The cache cannot be used.
        """
        super().__init__()
        _check_options(options, pretrained)
        check_int("seed", seed, minimum=0)
        check_int("max_gen_toks", max_gen_toks, minimum=1)
        if max_length is not None:
            check_int("max_length", max_length, minimum=2)
        if enable_thinking and think_end_token is None:
            raise InputError(
                "enable_thinking requires think_end_token; pass the text that ends the reasoning"
            )
        if sampling not in ("neutral", "recommended"):
            raise InputError(f"{arg('sampling')} must be neutral or recommended, got {sampling!r}")
        if cache is not None:
            NewDirectory.create(Path(cache))
        if options.get("device") == "cuda:0" and not torch.cuda.is_available():
            options["device"] = "auto"  # cuda:0 is the default of lm-eval's command
        self.llm = (
            pretrained if isinstance(pretrained, BaseLLM) else LLM(str(pretrained), **options)
        )
        self.tokenizer, self._images = self.llm.tokenizer, self.llm.images
        if self._images is not None:
            self.MULTIMODAL = True
        self._texts = HarnessTokenizer(
            self.tokenizer,
            add_bos_token=add_bos_token,
            prefix_token_id=prefix_token_id,
            think_end_token=think_end_token,
            enable_thinking=enable_thinking,
            chat_template_args=chat_template_args,
        )
        self.eot_token_id = self._texts.eos_token_id
        self.prefix_token_id = self._texts.prefix_token_id
        self.tokenizer_name = str(self.tokenizer.name_or_path).replace("/", "__")
        self._device = torch.device(self.llm.model_info.device_type)
        self._seed, self.max_gen_toks = seed, max_gen_toks
        self._enables_thinking = bool(enable_thinking)
        self._defaults = self.llm.spec.take_recommended() if sampling == "recommended" else {}
        self._revision = options.get("revision")
        self.max_length = self._resolve_max_length(max_length)
        self._answers = ResponseCache(
            self.llm, None if cache is None else self._journal(Path(cache))
        )

    def _resolve_max_length(self, max_length: int | None) -> int:
        context = self.llm.spec.context_length
        if max_length is not None and max_length > context:
            raise InputError(
                f"{arg('max_length', max_length)} exceeds the model's context length of "
                f"{context}; pass a smaller {arg('max_length')}"
            )
        return max_length or min(resolve_max_length(_config(self.llm), self.tokenizer), context)

    def _journal(self, directory: Path) -> Journal:
        info = self.get_model_info()
        if not info["model_fingerprint"]:
            raise InputError(
                "cache is not supported with a model in memory, which has no fingerprint; load "
                "the model from files"
            )
        no_part = ("model_num_parameters", "model_revision")
        return Journal(directory, {k: v for k, v in info.items() if k not in no_part})

    # Queries of lm-eval about the model
    def get_model_info(self) -> dict[str, Any]:
        """Return the model's entries in lm-eval's results."""
        model_info = self.llm.model_info
        keys = (
            None if model_info.engine.kv_cache_dtype == "auto" else model_info.engine.kv_cache_dtype
        )
        dtype = f"torch.{model_info.dtype}"
        identity = model_identity(self.llm.fingerprint, dtype, model_info.quantization, keys)
        return {
            "model_num_parameters": model_info.spec.num_weights,
            "model_revision": self._revision,
            **{f"model_{name}": value for name, value in identity.items()},
            "treegen_version": VERSION,
        }

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a conversation."""
        history = chat_history if self._images is None else list(map(with_images, chat_history))
        return self._texts.chat(history, add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            string: The text.
            add_special_tokens: Whether to add special tokens; None decides as lm-eval's `hf`.
            **kwargs: Ignored.
        """
        return self._texts.encode(string, add_special_tokens)

    # Log-likelihoods

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Score the continuations of requests; long contexts are truncated on the left."""
        if self._enables_thinking:
            raise InputError(
                "enable_thinking affects only generated answers; remove enable_thinking for "
                "tasks that score given texts"
            )
        pairs = [truncate_context(before, after, self.max_length) for _, before, after in requests]
        answers: dict[int, tuple[float, bool]] = {}
        scores = self._answers.scores(pairs)
        for request_index, answer in _show_progress(
            scores, len(pairs), "loglikelihood", disable_tqdm
        ):
            answers[request_index] = answer
            self.cache_hook.add_partial("loglikelihood", requests[request_index][0], answer)
        return [answers[request_index] for request_index in range(len(pairs))]

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Score whole texts, in windows of the model's length."""
        pairs: list[Pair] = []
        request_of_window: list[int] = []
        for request_index, request in enumerate(requests):
            text_windows = split_into_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length
            )
            pairs += text_windows
            request_of_window += [request_index] * len(text_windows)
        windows_of = Counter(request_of_window)
        parts: list[list[float]] = [[] for _ in requests]
        scores = self._answers.scores(pairs)
        kind = "loglikelihood_rolling"
        for window_index, (logprob, _) in _show_progress(scores, len(pairs), kind, disable_tqdm):
            request_index = request_of_window[window_index]
            parts[request_index].append(logprob)
            if len(parts[request_index]) == windows_of[request_index]:
                self.cache_hook.add_partial(
                    kind, requests[request_index].args, fsum(parts[request_index])
                )
        return [fsum(part) for part in parts]

    # Generation

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Draw one sample per request; equal requests are samples of one prompt."""
        prompts: dict[tuple[str, ...], tuple[SampledPrompt, GenSettings]] = {}
        members: dict[SampledPrompt, list[int]] = defaultdict(list)
        settings = []
        for request_index, request in enumerate(requests):
            context, gen_kwargs, *extra = request.args
            images = load_images(self._images, extra[0]) if extra else []
            text = context, repr(gen_kwargs), *(image.digest for image in images)
            if text not in prompts:
                prompts[text] = self._prompt(context, gen_kwargs, images)
            prompt, own_settings = prompts[text]
            members[prompt].append(request_index)
            settings.append(own_settings)
        answers: dict[int, str] = {}
        samples = self._answers.samples(
            {prompt: len(indices) for prompt, indices in members.items()}
        )
        kind = "generate_until"
        for prompt, sample_index, tokens in _show_progress(
            samples, len(requests), kind, disable_tqdm
        ):
            request_index = members[prompt][sample_index]
            answers[request_index] = self._texts.answer(tokens, settings[request_index].until)
            self.cache_hook.add_partial(kind, requests[request_index].args, answers[request_index])
        return [answers[request_index] for request_index in range(len(requests))]

    def _prompt(
        self, context: str, gen_kwargs: Mapping[str, Any], images: Sequence[PlacedImage] = ()
    ) -> tuple[SampledPrompt, GenSettings]:
        """Return a prompt, truncated to leave room for the answer, and its settings."""
        settings = gen_settings(
            gen_kwargs,
            max_gen_toks=self.max_gen_toks,
            seed=self._seed,
            eos=self._texts.eos,
            has_reasoning=self._texts.has_reasoning,
            defaults=self._defaults,
        )
        if self._images is not None and images:
            tokens = image_tokens(context, images, self._images, self._texts.encode_prompt)
            room = self.max_length - settings.params.max_tokens
            if len(tokens) > room:
                raise CapacityError(
                    f"a prompt with images has {len(tokens):,} tokens, but max_length minus "
                    f"max_gen_toks leaves only {max(room, 0):,}; lower max_gen_toks, or raise "
                    "max_length"
                )
            return SampledPrompt.of(tokens, settings.params), settings
        tokens = self._texts.encode_prompt(context)
        tokens = truncate_prompt(tokens, settings.params.max_tokens, self.max_length)
        return SampledPrompt.of(tokens, settings.params), settings


def _check_options(options: dict[str, Any], pretrained: str | BaseLLM) -> None:
    """Raise InputError unless a model can be loaded with some options."""
    own_names = [name for name in inspect.signature(TreegenLM).parameters if name != "options"]
    check_known(options, "model_args", own_names)
    if options and isinstance(pretrained, BaseLLM):
        raise InputError(
            f"the LLM is already loaded, so {', '.join(options)} would have no effect; pass "
            "the options to LLM"
        )


def _config(llm: BaseLLM) -> Any:
    """Return the configuration of a model, whether it is loaded here or by workers."""
    if isinstance(llm, LLM):
        return llm.model.module.config
    engine = llm.model_info.engine
    directory = locate(engine.model, engine.revision, weights=False)
    return read_config(
        engine.model,
        directory,
        revision=engine.revision,
        trust_remote_code=engine.trust_remote_code,
    )


def _show_progress(answers: Iterator[Any], total: int, kind: str, quiet: bool) -> Any:
    """Yield answers as they arrive, with a progress bar."""
    return tqdm(answers, total=total, desc=f"Running {kind} requests", disable=quiet)
