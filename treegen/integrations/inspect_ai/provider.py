"""The model provider: concurrent generations of Inspect share the steps of one LLM."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Final

from inspect_ai._util.error import PrerequisiteError
from inspect_ai.model import ChatMessage, GenerateConfig, ModelAPI, ModelOutput
from inspect_ai.model._cache import epoch  # the epoch that keys Inspect's own output cache
from inspect_ai.tool import ToolChoice, ToolFunction, ToolInfo

from treegen.errors import CacheFullError, ContextError, InputError, TreegenError, arg
from treegen.integrations.inspect_ai.conversion import (
    output_of,
    sampling_params,
    template_arguments,
    template_messages,
    template_tools,
)
from treegen.llm import LLM
from treegen.llm.async_llm import AsyncLLM
from treegen.model.options import EngineOptions, check_known
from treegen.prompts.replies.formats import tool_format as check_tool_format

_MODEL_ARGS: Final = ("chat_template", "chat_template_kwargs", "sampling", "tool_format")
_QUOTE: Final = "'"
_SAMPLING: Final = ("recommended", "neutral")
_CONNECTIONS: Final = 1024
_MAX_TOKENS: Final = 2048  # default length of an answer, as in Inspect's `hf`


class TreegenAPI(ModelAPI):
    """The provider of `--model treegen/DIR`; its arguments are those of `-M`."""

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig | None = None,
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        sampling: str = "recommended",
        tool_format: str | None = None,
        **options: Any,
    ) -> None:
        """Load a model.

        Args:
            model_name: A directory, a hub name, or "demo".
            base_url: Not supported; must be None.
            api_key: Ignored.
            config: Default generation settings.
            chat_template: Replaces the tokenizer's own template, or serves a model without one; a
                file, or the template itself.
            chat_template_kwargs: Arguments of the chat template, such as enable_thinking.
            sampling: Defaults for settings that a generation does not give: "recommended" uses the
                checkpoint's generation_config.json, as Inspect's `hf` and `vllm` do; "neutral" is
                temperature 1 without filters.
            tool_format: Format of the model's tool calls; by default the one that its chat template
                implies.
            **options: Options of LLM, such as dtype, device, memory or max_rows.

        Raises:
            PrerequisiteError: An argument is unknown or has an invalid value, or the model cannot
                be loaded. Inspect shows it in one line.
        """
        config = config or GenerateConfig()
        super().__init__(model_name, base_url, api_key, [], config)
        try:
            if base_url is not None:
                raise InputError(
                    "base_url is not supported, because treegen runs the model in this process; "
                    "remove base_url"
                )
            if not isinstance(chat_template_kwargs or {}, Mapping):
                raise InputError(
                    f"chat_template_kwargs must be a mapping, got {chat_template_kwargs}"
                )
            check_known(options, "model arguments", _MODEL_ARGS)
            if sampling not in _SAMPLING:
                raise InputError(
                    f"{arg('sampling')} must be {' or '.join(_SAMPLING)}, got {sampling!r}"
                )
            if tool_format is not None:
                check_tool_format(tool_format)
            llm = LLM(model_name, chat_template=chat_template, **options)
            self._served = AsyncLLM(llm, tool_format=tool_format)
        except TreegenError as error:
            raise PrerequisiteError(_name_model_args(error)) from error
        self._defaults = llm.spec.take_recommended() if sampling == "recommended" else {}
        self._template = dict(chat_template_kwargs or {})
        if config.max_connections is None and config.adaptive_connections is None:
            # Inspect's default starts with 20 connections and never exceeds 100. Its model shares
            # this config object, and calls max_connections once that default is off.
            config.adaptive_connections = False

    async def generate(
        self,
        input: list[ChatMessage],
        tools: list[ToolInfo],
        tool_choice: ToolChoice,
        config: GenerateConfig,
    ) -> ModelOutput:
        """Sample the answers to a conversation.

        Without a seed, a repeated conversation gets the next samples. With a seed, each epoch has
        its own samples, which are the same in each run. A conversation that is too long for the
        model gets an output that says so, as Inspect's agents expect.

        Args:
            input: Messages of the conversation.
            tools: Tools that the model may call.
            tool_choice: Whether the model has to call a tool, and which.
            config: Generation settings.

        Raises:
            InputError: A message or a setting cannot be used.
        """
        params, tool_specs = sampling_params(config, self._defaults), template_tools(tools)
        if tool_choice not in ("auto", "none"):
            if params.structure is not None:
                raise InputError(
                    "a forced tool call and a response_schema cannot be used together; remove "
                    "one of the two"
                )
            name = tool_choice.name if isinstance(tool_choice, ToolFunction) else None
            is_single = config.parallel_tool_calls is False
            grammar = self._served.replies.call_grammar(tool_specs or [], name, is_single=is_single)
            params = dataclasses.replace(params, grammar=grammar)
        start = time.perf_counter()
        try:
            (prompt,), (completions,) = await self._served.generate(
                [template_messages(input)],
                params,
                tools=tool_specs,
                chat_template_kwargs=template_arguments(config, self._template),
                first=(epoch.get(1) - 1) * params.n,
            )
        except (ContextError, CacheFullError) as error:  # agents shorten the conversation then
            message = _name_model_args(error)
            return ModelOutput.from_content(
                self.model_name, message, stop_reason="model_length", error=message
            )
        except InputError as error:
            raise InputError(_name_model_args(error)) from error
        return output_of(
            self.model_name,
            prompt.tolist(),
            completions,
            self._served.replies,
            text=self._served.text,
            tools=tool_specs,
            is_structured=params.structure is not None,
            logprobs=bool(config.logprobs),
            seconds=time.perf_counter() - start,
        )

    async def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(self._served.text.tokenizer(text)["input_ids"])

    async def count_text_tokens(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(await self.tokenize(text))

    def max_tokens(self) -> int:
        """Return the default length limit of an answer, in tokens."""
        return _MAX_TOKENS

    def max_connections(self) -> int:
        """Return the default number of concurrent generations."""
        return _CONNECTIONS

    def connection_key(self) -> str:
        """Return the key of models that share the limit of connections."""
        return self.model_name

    def collapse_user_messages(self) -> bool:
        """Return whether consecutive user messages are merged into one."""
        return True

    def close(self) -> None:
        """Drop running generations, and end the other ranks of a tensor-parallel model."""
        self._served.close(drain=False)
        self._served.llm.close()


def _name_model_args(error: TreegenError) -> str:
    """Return the message of an error with model arguments as Inspect's `-M NAME=VALUE`."""
    known = {*_MODEL_ARGS, *EngineOptions.__dataclass_fields__}

    def spell(reference: str) -> str:
        name, equals, value = reference.partition("=")
        if name not in known:
            return reference
        return f"-M {name}{equals}{value.strip(_QUOTE)}"

    return error.message.rename(spell)
