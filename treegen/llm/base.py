"""The calls of every LLM that sample, score and search, with their arguments and results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, SupportsIndex

from treegen.common.checks import check_int
from treegen.common.lifetimes import Closeable, NonCopyable
from treegen.common.outputs import Completion, RequestOutput, Score
from treegen.common.params import MAX_COUNT, Params, SamplingParams, check_tree_params
from treegen.common.progress import check_progress
from treegen.common.spec import ModelSpec
from treegen.engine.stream import RunResult, ScoreStream, Stream, run_to_end
from treegen.errors import InputError, arg
from treegen.llm.arguments import (
    PromptInput,
    check_node_params,
    choose_name,
    expand_params,
    find_missing_samples,
    make_output,
    missing_attribute,
    read_prompts,
    reject_unknown_arguments,
    repeat_params,
)
from treegen.model.model_info import ModelInfo
from treegen.prompts.expansion import sum_levels
from treegen.prompts.plan.draws import DrawCounter
from treegen.prompts.plan.plan import Plan, Request
from treegen.prompts.plan.requests import (
    ScoreContext,
    ScoreInput,
    build_flat_requests,
    build_sample_requests,
    build_score_requests,
    expand_requests,
)
from treegen.prompts.rollout_tree import RolloutTree
from treegen.prompts.tree import (
    Message,
    Node,
    as_list,
    chat_arguments,
    expansions_of,
    has_expansions,
)
from treegen.search.search_calls import LocalSearchCalls


class BaseLLM(LocalSearchCalls, Closeable, NonCopyable):
    """The calls of an LLM, built on abstract methods that each kind of LLM implements.

    Use it in a `with` statement, or `close` it, to release its resources.

    Attributes:
        images: The images that prompts contain; None if the model takes no images.
    """

    tokenizer: Any
    """The model's tokenizer."""
    spec: ModelSpec
    """The sizes of the model."""
    model_info: ModelInfo
    """The tokenizer, the spec, the images and everything else that plans depend on."""
    fingerprint: str
    """Identifies the weights; empty for a module that is not from a checkpoint."""
    _draw_counter: DrawCounter

    @property
    def max_rows(self) -> int:
        """Maximum number of samples decoded at once; for a Cluster, on each worker."""
        return self.model_info.max_rows

    def get_tokenizer(self) -> Any:
        """Return the tokenizer, as vLLM does."""
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the checkpoint recommends, or the defaults."""
        if not self.spec.recommended:
            return SamplingParams()
        return SamplingParams.from_generation_config(self)

    if not TYPE_CHECKING:  # to type checkers a class with __getattr__ has every attribute

        def __getattr__(self, name: str) -> Any:
            raise missing_attribute(self, name)

    def __repr__(self) -> str:
        info = self.model_info
        name = info.engine.model or "a module"
        return (
            f"{type(self).__name__}({name!r}, {info.dtype} on {info.device_type}, at most "
            f"{info.max_rows:,} rows)"
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise InputError(
            f"{type(self).__name__} cannot be pickled, because the model is in the memory of this "
            f"process; create a separate {type(self).__name__} in each process"
        )

    @abstractmethod
    def _plan(self, requests: Sequence[Request]) -> Plan:
        """Plan the segments and attention levels of requests."""

    @abstractmethod
    def _check_ready(self) -> None:
        """Raise InputError while a run is not finished."""

    @abstractmethod
    def _start(
        self, plan: Plan, params: Sequence[SamplingParams], samples: Sequence[Sequence[int]]
    ) -> Stream:
        """Start a run of a plan.

        Args:
            plan: The requests and their segments.
            params: Sampling parameters of each request.
            samples: Indices of the samples to draw, for each request.
        """

    @abstractmethod
    def _open_stream(self, plan: Plan, params: Sequence[SamplingParams]) -> Stream:
        """Start a run of a plan that draws only the samples added by `Stream.add_work`."""

    def _sample_requests(
        self, tree: Node, params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        return build_sample_requests(tree, self.tokenizer, params, self.spec, self.images)

    # Sampling

    def plan(self, tree: Node, params: Params | None = None) -> Plan:
        """Return what running a tree would share, store and read, without computing anything.

        If a tree declares generated levels, its prompts are planned as if all rows of the largest
        level were drawn below them. `Plan.generated` then sums up the levels.

        Args:
            tree: Root of the prompt tree.
            params: Sampling parameters. Default: those of `SamplingParams()`.

        Raises:
            TreeError: the tree is malformed.
            InputError: the tokenizer or the chat template rejects a prompt.
            CapacityError: a prompt is too long for the model.
        """
        params = check_tree_params(params)
        if not has_expansions(tree):
            return self._plan(self._sample_requests(tree, params))
        requests = expand_requests(tree, self.tokenizer, params, self.spec, self.images)
        levels = [expansion.node.expand for expansion in expansions_of(tree)]
        return replace(self._plan(requests), generated=sum_levels(levels, params))

    @reject_unknown_arguments
    def stream(
        self,
        tree: Node,
        params: Params | Sequence[Params] | None = None,
        *,
        skip: Collection[tuple[str, int]] = (),
    ) -> Stream:
        """Sample a tree; return an iterator over completions as they finish.

        The seed, the node's id and the sample's index determine the draws of a sample. For a node
        without an id, the prompt's tokens replace the id. Then, as with `generate`, another call
        with the same prompt draws further samples, unless params have a seed or `skip` is given.

        Args:
            tree: Root of the prompt tree.
            params: Sampling parameters of all sampled nodes, or a list with those of each node, in
                the order that the tree declares. Default: those of `SamplingParams()`.
            skip: (prompt id, sample index) pairs to leave out, for example when a run is resumed.
                The remaining samples do not depend on it. Default: none.

        Raises:
            InputError: params or skip cannot be used, or another run of this LLM is not finished.
            CacheFullError: a single prompt is too long for the cache.
            TreegenError: as for `plan`.
            NumericsError: from the iterator, logits are not numbers.
            CapacityError: from the iterator, the GPU's memory is full.
        """
        checked = check_node_params(params)
        requests = self._sample_requests(tree, checked)
        return self._start_numbered(requests, repeat_params(checked, len(requests)), skip)

    def _start_numbered(
        self,
        requests: Sequence[Request],
        params: Sequence[SamplingParams],
        skip: Collection[tuple[str, int]] = (),
    ) -> Stream:
        """Start a run whose samples are numbered after those that this LLM has drawn."""
        samples, skips = find_missing_samples(requests, skip)
        self._check_ready()
        counter = DrawCounter(None if skips else self._draw_counter)
        requests = counter.continue_numbering_flat(requests, [one.seed for one in params])
        stream = self._start(self._plan(requests), params, samples)
        # Only now, because a call that fails to start draws nothing.
        self._draw_counter.update(counter)
        return stream

    def open_stream(self, tree: Node, params: Params | Sequence[Params]) -> Stream:
        """Start a run of a tree that draws only the samples added by `Stream.add_work`.

        Work may be added at any time. The samples are those of `stream`, in whatever order and
        parts they are added. Raises what `stream` raises.

        Args:
            tree: Root of the prompt tree.
            params: As for `stream`.
        """
        checked = check_node_params(params)
        requests = self._sample_requests(tree, checked)
        self._check_ready()
        return self._open_stream(self._plan(requests), repeat_params(checked, len(requests)))

    def adopt_plan(self, plan: Plan, model_info: ModelInfo) -> Plan:
        """Return a plan for this LLM: the same plan, unless this LLM shares or stores differently.

        Args:
            plan: A plan that `model_info` made, for example before the model was loaded.
            model_info: The properties that the plan was made from.
        """
        return plan if self.model_info.plans_like(model_info) else self._plan(plan.requests)

    def start_plan(
        self,
        plan: Plan,
        params: SamplingParams | Sequence[SamplingParams],
        *,
        skip: Collection[tuple[str, int]] = (),
        on_demand: bool = False,
    ) -> Stream:
        """Sample the requests of a plan, as `stream` does for a tree whose nodes have ids.

        Args:
            plan: A plan from `adopt_plan`.
            params: The sampling parameters of all requests, or one for each.
            skip: As for `stream`.
            on_demand: Whether to draw only the samples added by `Stream.add_work`, as with
                `open_stream`.

        Raises:
            TreegenError: as for `stream`.
        """
        request_params = repeat_params(params, len(plan.requests))
        samples, _ = find_missing_samples(plan.requests, skip)
        self._check_ready()
        if on_demand:
            return self._open_stream(plan, request_params)
        return self._start(plan, request_params, samples)

    @reject_unknown_arguments
    def run(
        self,
        tree: Node,
        params: Params | Sequence[Params] | None = None,
        *,
        progress: bool | None = None,
    ) -> RunResult:
        """Sample a whole tree; return the completions in the order that the tree declares.

        Args:
            tree: Root of the prompt tree.
            params: As for `stream`.
            progress: Whether to show a progress bar of finished samples. Default: only in a
                notebook.

        Raises:
            TreegenError: as for `stream` and its iterator.
        """
        check_progress(progress)
        return run_to_end(self.stream(tree, params), progress)

    @reject_unknown_arguments
    def generate(
        self,
        prompts: Iterable[PromptInput] | PromptInput,
        params: Params | Sequence[Params] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Return params.n completions of each flat prompt; shared prefixes are found in the tokens.

        The prompt's tokens and the sample's index determine the draws of a sample. Without a seed,
        another call with the same prompt draws further samples: its indices continue after those
        that this LLM has drawn. With a seed, each call draws the same samples. A prompt that
        appears twice in one call gets different samples each time.

        Args:
            prompts: A list of prompts, or one of them. A prompt is text, token ids, chat messages,
                `{"prompt": text}` or `{"prompt_token_ids": ids}`. One conversation goes to `chat`.
            params: Sampling parameters of all prompts, or a list with those of each prompt.
                Default: those of `SamplingParams()`.
            tools: Tools that the chat template lists. Default: none.
            chat_template_kwargs: Further arguments of the chat template. Default: none.
            progress: Whether to show a progress bar of finished samples. Default: only in a
                notebook.
            sampling_params: vLLM's name of params.
            use_tqdm: vLLM's name of progress.

        Returns:
            The output of each prompt, in the order of the prompts. An output is a list of its
            completions, and has the fields of vLLM's `RequestOutput`.

        Raises:
            InputError: the lengths of params and prompts differ, and as for `stream`.
            TreegenError: as for `stream` and its iterator.
        """
        params = choose_name("params", params, "sampling_params", sampling_params)
        progress = choose_name("progress", progress, "use_tqdm", use_tqdm)
        check_progress(progress)
        contents = read_prompts(prompts)
        prompt_params = expand_params(params, len(contents))
        if not contents:
            return []
        template = chat_arguments(tools, chat_template_kwargs)
        requests = build_flat_requests(
            contents, prompt_params, self.tokenizer, self.spec, template, self.images
        )
        result = run_to_end(self._start_numbered(requests, prompt_params), progress)
        grouped: list[list[Completion]] = [[] for _ in contents]
        for completion in result.completions:
            grouped[int(completion.prompt_id)].append(completion)
        return [
            make_output(completions, content, request, self.model_info)
            for completions, content, request in zip(grouped, contents, requests, strict=True)
        ]

    @reject_unknown_arguments
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params | Sequence[Params] | None = None,
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Return params.n answers to each conversation; a special case of `generate`.

        Args:
            messages: One conversation, such as `[{"role": "user", "content": "Hi"}]`, or several.
            params: As for `generate`.
            tools: As for `generate`.
            chat_template_kwargs: As for `generate`.
            progress: As for `generate`.
            sampling_params: vLLM's name of params.
            use_tqdm: vLLM's name of progress.
        """
        conversations = as_list("messages", messages)
        if conversations and isinstance(conversations[0], Mapping):
            conversations = [conversations]
        return self.generate(
            conversations,
            params,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            progress=progress,
            sampling_params=sampling_params,
            use_tqdm=use_tqdm,
        )

    @reject_unknown_arguments
    def score(
        self,
        pairs: Iterable[tuple[ScoreContext, ScoreInput]] | RolloutTree,
        *,
        top: int = 0,
        prompt_lengths: Sequence[SupportsIndex] | None = None,
    ) -> list[Score]:
        """Return the log-likelihood of each continuation given its context.

        All samples of a tree are scored in one call, and each segment is computed once.

        A context that several pairs share is computed once. If a context is empty, or all its
        tokens merge with the continuation's, the tokenizer's beginning-of-sequence token replaces
        it, or the end-of-sequence token if there is no beginning-of-sequence token.

        Args:
            pairs: (context, continuation), both texts or both token ids. A context may also be chat
                messages, with images; the continuation is then the assistant's reply. Or a tree
                of rollouts; the result then has a score for each sample.
            top: Number of most likely tokens to report at the position of each token of
                a continuation, as `Score.top`; all tokens, if the vocabulary has fewer. Default: 0.
            prompt_lengths: For each sample of a tree the number of first tokens that get no
                log-probability, such as those of its prompt. Default: 1, because nothing predicts
                the first token of a text.

        Raises:
            InputError: pairs cannot be used, or another run of this LLM is not finished.
            CapacityError: a pair is too long for the model or for the cache.
            NumericsError: logits are not numbers.
        """
        if isinstance(pairs, RolloutTree):
            check_int("top", top, minimum=0, maximum=MAX_COUNT)
            split = pairs.split(prompt_lengths)
            scores_of_texts = iter(self.score([pair for pair in split if pair[1]], top=top))
            none = Score.of_no_tokens(min(top, self.spec.vocab_size))
            return [next(scores_of_texts) if pair[1] else none for pair in split]
        if prompt_lengths is not None:
            raise InputError(f"{arg('prompt_lengths')} needs a RolloutTree; remove the argument")
        with self.score_stream(pairs, top=top) as stream:
            scores = dict(stream)
            stream.check_complete()
        return [scores[index] for index in range(len(scores))]

    def score_stream(
        self, pairs: Iterable[tuple[ScoreContext, ScoreInput]], *, top: int = 0
    ) -> ScoreStream:
        """Return an iterator over (index of the pair, score), in the order in which scores finish.

        Args:
            pairs: As for `score`.
            top: As for `score`.

        Raises:
            TreegenError: as for `score`; NumericsError comes from the iterator.
        """
        check_int("top", top, minimum=0, maximum=MAX_COUNT)
        requests = build_score_requests(
            as_list("pairs", pairs), self.tokenizer, self.spec, self.images, top=top
        )
        return self.score_plan(self._plan(requests))

    def score_plan(self, plan: Plan) -> ScoreStream:
        """Score the texts of a plan; return what `score_stream` returns, by index of the request.

        Args:
            plan: A plan of requests that are scored and not sampled.

        Raises:
            TreegenError: as for `score_stream`.
        """
        num = len(plan.requests)
        return ScoreStream(self._start(plan, [SamplingParams()] * num, [[] for _ in range(num)]))
