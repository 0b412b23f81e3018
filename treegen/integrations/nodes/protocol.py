"""The protocol of nodes: the JSON of requests and answers of /v1/nodes. No torch here.

A node is a piece of text in a tree, which the model can continue. A client creates a root from a
prompt, and then samples, extends and scores nodes by their ids.

Every draw follows from the seed and the origin of the root, the path of the node and the index of
the sample, whatever other clients do. A path has the indices below the root, such as "0/+0/2": the
sample 0 of the root, the extension 0 of that sample, and the sample 2 of that extension. So a
client can draw the same tree again, for example after a restart of the server.

All nodes of a tree share a lease. Each use of one of them renews it. When it has passed, the server
drops the tree.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from treegen.common.params import MAX_COUNT, MAX_SEED
from treegen.integrations.nodes.params import NodeModel, Sampling, Token, Variables

IDEMPOTENCY_HEADER: Final = "Idempotency-Key"
"""Header of a POST request with a text that the client chooses. If the client sends the request
again with the same text, the server returns the stored answer and does nothing else."""

CONTEXT_ERROR: Final = "context_length_exceeded"
"""The type of an error because of a text that is too long for the model's context."""

Text = Annotated[str, Field(max_length=2**24)]
MAX_INDEX: Final = 10**6
"""Highest index of a child."""
Index = Annotated[int, Field(ge=0, le=MAX_INDEX)]
NodeName = Annotated[str, Field(min_length=1, max_length=64)]
"""The id of a node. In a batch also "#3", the node that the operation 3 of the batch makes (counted
from 0), or "#3.1", the child 1 that the operation 3 samples."""


# Requests


class RootFields(NodeModel):
    """The prompt of a tree, its seed and its defaults. Exactly one of prompt and messages is given.

    Without a name, the origin of the draws follows from the token ids of the prompt.
    """

    prompt: Text | Annotated[list[Token], Field(min_length=1)] | None = None
    """Text or token ids."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    """Chat messages, as for /v1/chat/completions, also with images as data URLs."""
    tools: list[Any] | None = None
    """Tools that the chat template lists."""
    chat_template_kwargs: Variables | None = None
    """Further variables of the chat template."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """Decides every draw, together with the origin and the path; null lets the server choose one,
    which the answer reports."""
    name: Annotated[str, Field(max_length=1_000)] | None = None
    """The origin of the draws: equal names and seeds give equal draws below equal paths."""
    repeat: Index = 0
    """For a root without a name, the number of earlier roots of the same prompt and seed whose
    draws must differ from those of this root."""
    params: Sampling = Sampling()
    """Default sampling parameters of the tree."""
    lease_seconds: Annotated[float, Field(gt=0)] | None = None
    """Time after the last use of the tree until the server drops it; null is the server's default.
    The answer reports the actual time, which the server limits."""


class SampleFields(NodeModel):
    """Draws children of a node."""

    n: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 1
    """Number of children."""
    first: Index | None = None
    """Index of the first child; null continues after the highest index drawn so far. The draws of a
    child follow from its index, so an index that is drawn again gives a node with equal tokens."""
    params: Sampling = Sampling()
    """Sampling parameters that replace those of the tree."""


class ExtendFields(NodeModel):
    """Appends given text to a node, as a child. Exactly one of the contents is given."""

    text: Text | None = None
    """Text to append, such as a tool's result."""
    parts: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    """Parts of type text and image_url, as in chat messages; no role markers are added."""
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    """Chat messages that follow the reply which the node ends, such as a tool's answer or a user's
    turn. The chat template renders them, up to the start of the next reply."""
    index: Index | None = None
    """Index of the child among the extensions of the node; null is the next one."""


class ScoreFields(NodeModel):
    """Computes the log-likelihoods of continuations of a node; makes no nodes."""

    texts: Annotated[list[Text], Field(min_length=1, max_length=10_000)]
    """The continuations."""
    top: Annotated[int, Field(ge=0, le=20)] = 0
    """Number of most likely tokens to report at the position of each token."""


class RootRequest(RootFields):
    """POST /v1/nodes creates the root of a tree."""

    model: str = ""
    """Name of the served model; empty is the served one."""


class NodeSampleRequest(SampleFields):
    """POST /v1/nodes/{id}/sample draws children of a node."""

    stream: bool = False
    """Whether to send each child as a server-sent event as soon as it has ended; see `Event`."""


class ExtendRequest(ExtendFields):
    """POST /v1/nodes/{id}/extend appends given text to a node."""


class NodeScoreRequest(ScoreFields):
    """POST /v1/nodes/{id}/score returns log-likelihoods of continuations of a node."""


class RootOperation(RootFields):
    """Creates a root."""

    op: Literal["root"]


class SampleOperation(SampleFields):
    """Draws children of a node."""

    op: Literal["sample"]
    node: NodeName


class ExtendOperation(ExtendFields):
    """Appends given text to a node."""

    op: Literal["extend"]
    node: NodeName


class ScoreOperation(ScoreFields):
    """Computes the log-likelihoods of continuations of a node."""

    op: Literal["score"]
    node: NodeName


class RewardOperation(NodeModel):
    """Computes the values that the server's verifier gives nodes, from 0 to 1.

    The verifier reads the text of the prompt as the question, and the text after the prompt as the
    answer.
    """

    op: Literal["reward"]
    nodes: Annotated[list[NodeName], Field(min_length=1, max_length=10_000)]


class ReadOperation(NodeModel):
    """Returns a node, and renews the lease of its tree."""

    op: Literal["read"]
    node: NodeName


class DropOperation(NodeModel):
    """Drops a node and all nodes below it, once all earlier operations of the batch have ended."""

    op: Literal["drop"]
    node: NodeName


Operation = Annotated[
    RootOperation
    | SampleOperation
    | ExtendOperation
    | ScoreOperation
    | RewardOperation
    | ReadOperation
    | DropOperation,
    Field(discriminator="op"),
]


class BatchRequest(NodeModel):
    """POST /v1/nodes/batch runs several operations, which share the steps of the engine.

    The operations start in order, each once the operations that it names have ended. If one fails,
    its result has the error, and the operations that name it fail too. The others are not affected.
    """

    model: str = ""
    """Name of the served model; empty is the served one."""
    operations: Annotated[list[Operation], Field(min_length=1)]


# Answers


class Memory(NodeModel):
    """What the client's nodes take, and its limits."""

    nodes: int
    """Number of nodes."""
    max_nodes: int
    """Maximum number of nodes."""
    tokens: int
    """Number of tokens of the nodes. A shared token counts once, for the topmost node."""
    max_tokens: int
    """Maximum number of tokens."""
    bytes: int
    """Size of their keys and values; those of idle nodes may be evicted until they are used."""
    max_samples: int = 128
    """Maximum number of children of one sample operation."""
    max_operations: int = 256
    """Maximum number of operations of one batch."""


class NodeUsage(NodeModel):
    """What one operation has computed."""

    decoded_tokens: int = 0
    """Generated tokens."""
    prefilled_tokens: int = 0
    """Given or evicted tokens that went through the model."""


class NodeThinking(NodeModel):
    """The reasoning in a sample, as in `treegen.common.outputs.Thinking`."""

    num_tokens: int
    end: int
    is_closed: bool
    is_forced: bool


class NodeAnswer(NodeModel):
    """A node. Text, tokens and log-probabilities are its own, without those above it."""

    object: Literal["node"] = "node"
    id: str
    tree: str
    """Id of the root."""
    parent: str | None
    """Id of the node above; null for a root."""
    path: str
    """Indices below the root, such as "0/+0/2"; empty for a root."""
    depth: int
    """Number of nodes above it."""
    index: int
    """Index among the samples, or among the extensions, of the node above; 0 for a root."""
    seed: int | None = None
    """Seed of the root; of a sample, the seed of its draws."""
    origin: str | None = None
    """For a root, a name: another root with this name and the same seed draws the same."""
    text: str
    """The text of a sample; the text of other nodes is only in the answer of `read`."""
    token_ids: list[int]
    """Generated tokens, including those of the stop; empty for given text."""
    logprobs: list[float]
    """Natural-log probability of each generated token."""
    top_logprobs: list[list[tuple[int, float]]] = Field(default_factory=list)
    """For each token the most likely (token id, log-probability) pairs, if requested."""
    finish_reason: Literal["stop", "length", "confidence", "error", "given"]
    """How the text ended; "given" for roots and extensions."""
    stop: str | int | None = None
    """The stop string or token id that ended it; null if neither did."""
    confidences: list[float] = Field(default_factory=list)
    certainties: list[float] = Field(default_factory=list)
    thinking: NodeThinking | None = None
    versions: list[tuple[int, int]] = Field(default_factory=list)
    """As `Completion.versions`; left out if the loaded weights drew all tokens."""
    num_context_tokens: int
    """Number of tokens from the start of the prompt to the end of the node."""
    num_tokens: int
    """Number of tokens that the node takes in the cache, as `Memory.tokens` counts them."""
    num_children: int = 0
    """Number of children that are not dropped."""
    expires_in: float
    """Seconds until the lease of the tree ends, unless it is renewed."""

    @model_serializer(mode="wrap")  # an annotation of the result would replace the JSON schema
    def _omit_no_versions(self, dump: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]
        return {name: value for name, value in dump(self).items() if name != "versions" or value}


class NodeResult(NodeModel):
    """A node that was created or read."""

    object: Literal["node.result"] = "node.result"
    node: NodeAnswer
    usage: NodeUsage = NodeUsage()
    memory: Memory


class ReadResult(NodeResult):
    """GET /v1/nodes/{id}: a node with what it costs."""

    children: list[str]
    """Ids of the children that are not dropped, in order: samples, then extensions."""
    subtree_nodes: int
    """Number of nodes that dropping the node would free, itself included."""
    subtree_tokens: int
    """Number of tokens that dropping the node would free."""
    cached_tokens: int
    """How many of the node's tokens are in the cache now."""


class SampleResult(NodeModel):
    """The children that were sampled, in the order of their indices."""

    object: Literal["node.samples"] = "node.samples"
    nodes: list[NodeAnswer]
    usage: NodeUsage = NodeUsage()
    memory: Memory


class ScoreAnswer(NodeModel):
    """The log-likelihood of one continuation."""

    logprob: float
    """Natural-log probability of the whole continuation."""
    token_ids: list[int]
    logprobs: list[float]
    is_greedy: bool
    """Whether each token is the most likely one."""
    top_logprobs: list[list[tuple[int, float]]] = Field(default_factory=list)
    """For each token the most likely (token id, log-probability) pairs, if requested."""


class ScoreResult(NodeModel):
    """The log-likelihoods of continuations, in the order of the request."""

    object: Literal["node.scores"] = "node.scores"
    scores: list[ScoreAnswer]
    usage: NodeUsage = NodeUsage()
    memory: Memory


class RewardResult(NodeModel):
    """The values of nodes, in the order of the request."""

    object: Literal["node.rewards"] = "node.rewards"
    rewards: list[float]
    memory: Memory


class DropResult(NodeModel):
    """The result of DELETE /v1/nodes/{id}."""

    object: Literal["node.dropped"] = "node.dropped"
    id: str
    dropped_nodes: int
    """Number of nodes that were dropped."""
    dropped_tokens: int
    """Number of tokens that they took."""
    memory: Memory


class TreeAnswer(NodeModel):
    """A tree of the client, for choosing what to drop."""

    id: str
    """Id of the root."""
    nodes: int
    """Number of nodes."""
    tokens: int
    """Number of tokens."""
    idle_seconds: float
    """Time since the last use."""
    expires_in: float
    """Seconds until the lease ends, unless it is renewed."""


class TreeList(NodeModel):
    """GET /v1/nodes: the client's trees, least recently used first."""

    object: Literal["list"] = "list"
    data: list[TreeAnswer]
    memory: Memory


class ErrorDetails(NodeModel):
    """What is wrong, in OpenAI's form.

    Status 400: the request cannot be used. 404: the node does not exist, for example because its
    lease has ended or the server was restarted; create it again by its path. 409: the idempotency
    key was used for another request. 429: the client is at a limit, or too many samples wait. 503:
    the server stops.
    """

    message: str
    type: str
    """The kind of the error: "context_length_exceeded" if a text is too long for the model's
    context; for other errors it follows from the status."""
    param: str | None
    """The field at fault, or to lower; null if it is not one field."""
    code: int
    """The HTTP status."""
    free: list[TreeAnswer] | None = None
    """If the client is at a limit, trees to drop, least recently used first."""


class ErrorAnswer(NodeModel):
    """The body of every answer whose status is not 200."""

    error: ErrorDetails


class FailedOperation(NodeModel):
    """The result of an operation of a batch that failed."""

    object: Literal["error"] = "error"
    error: ErrorDetails


_Done = ReadResult | NodeResult | SampleResult | ScoreResult | RewardResult | DropResult
Result = _Done | FailedOperation


class BatchAnswer(NodeModel):
    """The results of a batch, in the order of the operations."""

    object: Literal["node.batch"] = "node.batch"
    results: list[Result]
    memory: Memory


class Event(NodeModel):
    """One server-sent event of a streamed sample request.

    A stream has a "node" event for each child, in the order in which the children end, and ends
    with a "done" or an "error" event, then the line `data: [DONE]`. Ignore events of other types.
    """

    type: Literal["node", "done", "error"]
    node: NodeAnswer | None = None
    """The child, for "node"."""
    usage: NodeUsage | None = None
    """For "done"."""
    memory: Memory | None = None
    """For "done"."""
    error: ErrorDetails | None = None
    """For "error"; the children that were sent stay in the tree."""
