"""Batches: several operations of one request, which may name nodes that earlier ones make."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from typing import Final

from treegen.integrations.nodes import protocol
from treegen.integrations.server.errors import describe_error
from treegen.integrations.server.node_answers import check_answer_size
from treegen.integrations.server.node_calls import NodeCalls
from treegen.integrations.server.nodes import Changes, Client, ServedNode
from treegen.integrations.server.requests import RequestError

_REFERENCE: Final = re.compile(r"#(\d{1,9})(?:\.(\d{1,9}))?")


class BatchRunner:
    """Runs batches of operations."""

    def __init__(self, calls: NodeCalls) -> None:
        """Create a runner; `calls` runs the operations."""
        self._calls = calls

    async def run(
        self, client: Client, request: protocol.BatchRequest, changes: Changes
    ) -> protocol.BatchAnswer:
        """Run several operations, which may name nodes that earlier ones make.

        Args:
            client: The client.
            request: The request.
            changes: Records what the batch changes.
        """
        operations = request.operations
        for index, operation in enumerate(operations):
            for needed in _find_references(operation):
                if needed >= index:
                    field = "nodes" if isinstance(operation, protocol.RewardOperation) else "node"
                    raise RequestError(
                        f"operation {index} refers to a result of operation {needed}, but can "
                        "use only results of earlier operations",
                        f"operations.{index}.{field}",
                    )
        check_answer_size([op for op in operations if isinstance(op, protocol.ScoreOperation)])
        tasks: list[asyncio.Task[protocol.Result]] = []
        last_drop = 0
        try:
            for index, operation in enumerate(operations):
                if isinstance(operation, protocol.DropOperation):
                    # The last drop awaits all operations before it.
                    awaited, last_drop = tasks[last_drop:], index
                else:
                    awaited = [tasks[needed] for needed in set(_find_references(operation))]
                run = self._run_operation(client, operation, index, tasks, awaited, changes)
                tasks.append(asyncio.ensure_future(run))
            results = [await task for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return protocol.BatchAnswer(results=results, memory=self._calls.store.memory(client))

    async def _run_operation(
        self,
        client: Client,
        operation: protocol.Operation,
        index: int,
        tasks: Sequence[asyncio.Task[protocol.Result]],
        awaited: Sequence[asyncio.Task[protocol.Result]],
        changes: Changes,
    ) -> protocol.Result:
        """Return the result of an operation of a batch, or its error.

        Args:
            client: The client.
            operation: The operation.
            index: Its index in the batch.
            tasks: The tasks of the batch's operations; those before `index` have been created.
            awaited: Operations that must end first.
            changes: Records what the batch changes.
        """
        calls, operation_changes = self._calls, Changes()
        try:
            if awaited:
                await asyncio.wait(awaited)
            find = partial(self._find, client, tasks)
            match operation:
                case protocol.RootOperation():
                    return await calls.root(client, operation, operation_changes)
                case protocol.SampleOperation():
                    return await calls.sample(
                        client, find(operation.node), operation, operation_changes
                    )
                case protocol.ExtendOperation():
                    return await calls.extend(
                        client, find(operation.node), operation, operation_changes
                    )
                case protocol.ScoreOperation():
                    return await calls.score(client, find(operation.node), operation)
                case protocol.RewardOperation():
                    nodes = [find(name, "nodes") for name in operation.nodes]
                    return await calls.reward(client, nodes)
                case protocol.ReadOperation():
                    return await calls.read(client, find(operation.node))
                case protocol.DropOperation():
                    return calls.drop(client, find(operation.node))
        except Exception as error:
            operation_changes.undo(self._calls.store)
            details = protocol.ErrorDetails(**describe_error(error))
            if details.param is not None:
                details.param = f"operations.{index}.{details.param}"
            return protocol.FailedOperation(error=details)
        finally:
            changes.nodes += operation_changes.nodes
            changes.indices += operation_changes.indices

    def _find(
        self,
        client: Client,
        tasks: Sequence[asyncio.Task[protocol.Result]],
        name: str,
        param: str = "node",
    ) -> ServedNode:
        """Return the node with an id, or that an earlier operation of the batch has made.

        Args:
            client: The client.
            tasks: The operations of the batch.
            name: The id or the reference.
            param: Field of the request that has it.
        """
        reference = _REFERENCE.fullmatch(name)
        if reference is None:
            return self._calls.store.find(client, name, param)
        result = tasks[int(reference[1])].result()
        answers: list[protocol.NodeAnswer] = []
        if isinstance(result, protocol.SampleResult):
            answers = result.nodes
        elif isinstance(result, protocol.NodeResult) and reference[2] is None:
            answers = [result.node]
        index = int(reference[2] or 0)
        if index >= len(answers) or (reference[2] is None and len(answers) != 1):
            reason = (
                "failed"
                if isinstance(result, protocol.FailedOperation)
                else "did not create this node"
            )
            raise RequestError(f"{name} refers to operation {reference[1]}, which {reason}", param)
        return self._calls.store.find(client, answers[index].id, param)


def _find_references(operation: protocol.Operation) -> list[int]:
    """Return the indices of the operations of a batch that an operation names."""
    if isinstance(operation, protocol.RootOperation):
        return []
    names = operation.nodes if isinstance(operation, protocol.RewardOperation) else [operation.node]
    matches = (_REFERENCE.fullmatch(name) for name in names)
    return [int(reference[1]) for reference in matches if reference is not None]
