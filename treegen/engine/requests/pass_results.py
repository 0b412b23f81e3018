"""Records the results of a pass once they are known: adds tokens to rows, and ends samples.

Errors that end a run get messages that tell the user what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from treegen.engine.compute.levels import Ints
from treegen.engine.features import Features
from treegen.engine.passes.decode import InFlightStep
from treegen.engine.passes.prefill import InFlightPrefill
from treegen.engine.requests.admission import AdmissionController
from treegen.engine.requests.output_processor import OutputProcessor
from treegen.engine.rows.engine_run import EngineRun
from treegen.engine.rows.table import RowPhase, VerifyInput
from treegen.engine.speculative.speculation import SpeculativeDecoder
from treegen.errors import (
    CapacityError,
    InternalError,
    NumericsError,
    TreegenError,
    WorkerError,
    arg,
)
from treegen.ops.sampling.draw import HostDraws


class PassResultProcessor:
    """Records the results of the passes of one run."""

    def __init__(
        self,
        run: EngineRun,
        features: Features,
        admission: AdmissionController,
        outputs: OutputProcessor,
        speculation: SpeculativeDecoder | None,
    ) -> None:
        """Set up the processor of one run.

        Args:
            run: Shared state of the run.
            features: Its optional features.
            admission: Opens and closes requests.
            outputs: Ends samples.
            speculation: Learns from the tokens drawn after its drafts; None without drafting.
        """
        self._run, self._confidence = run, features.confidence
        self._admission, self._outputs, self._speculation = admission, outputs, speculation
        self._ending: list[Ints] = []  # slots of rows that end, or may end

    def record(self, flight: InFlightPrefill | InFlightStep) -> None:
        """Wait for a pass, and record its results. Finished rows stay until `end`."""
        if isinstance(flight, InFlightPrefill):
            self._record_prefill(flight)
        else:
            self._record_draws(flight)

    def end(self) -> bool:
        """End the samples that the recorded tokens complete. Return whether there were any."""
        ending, self._ending = self._ending, []
        if ending:
            self._outputs.end(np.concatenate(ending))
        return bool(ending)

    def _record_prefill(self, flight: InFlightPrefill) -> None:
        """Record the results of a prefill pass, and the first tokens drawn after it."""
        lse = flight.wait()
        self._run.model_runner.check()
        check_numbers(lse, flight.describe_row)
        for scored in flight.scored:
            scored.add()
        self._admission.on_computed(flight.iter_finished_segments())
        for first in flight.first:
            self._record_draws(first.flight)
            self.end()
            self._admission.add_rows(first.requests)

    def _record_draws(self, flight: InFlightStep) -> None:
        """Record the drawn tokens of rows that have not left since."""
        draws = flight.fetch.wait().flat()
        self._run.model_runner.check()
        alive = self._run.rows.serial[flight.slots] == flight.serials
        if self._speculation is not None:
            self._speculation.record(flight, draws.tokens, alive)
        if flight.verify_input is None:
            self._record_tokens(flight, draws, np.flatnonzero(alive))
            return
        self._record_verified(flight, flight.verify_input, draws, alive)

    def _record_verified(
        self,
        flight: InFlightStep,
        verify_input: VerifyInput,
        sampled: HostDraws,
        alive: NDArray[np.bool_],
    ) -> None:
        """Record the tokens of rows up to the one drawn after the last accepted draft token."""
        rows, tokens, slots = self._run.rows, sampled.tokens, flight.slots
        draws, is_last = verify_input.find_accepted_rows(tokens)
        is_last, draws = is_last[alive[draws]], draws[alive[draws]]
        may_end = self._run.param_sets.may_end(rows.params[slots[draws]], tokens[draws])
        # A row that may end before its last token is checked after each token.
        slow = np.zeros(len(rows.phase), dtype=np.bool_)
        slow[slots[draws[may_end & ~is_last]]] = True
        if self._confidence.used:
            slow[slots[draws]] = True
        in_turn = slow[slots[draws]]
        self._record_tokens(flight, sampled, draws[~in_turn], is_last[~in_turn])
        self._run.usage.accepted_tokens += int((~in_turn & ~is_last).sum())
        remaining = draws[in_turn]
        index = verify_input.index_T[remaining]
        for turn in range(int(index.max(initial=-1)) + 1):
            now = remaining[index == turn]
            # A row may have ended at one of its earlier tokens.
            stays = rows.serial[slots[now]] == flight.serials[now]
            stays &= rows.phase[slots[now]] == RowPhase.LIVE
            self._record_tokens(flight, sampled, now[stays])
            self.end()
            self._run.usage.accepted_tokens += int(stays.sum()) if turn else 0

    def _record_tokens(
        self,
        flight: InFlightStep,
        sampled: HostDraws,
        draws: NDArray[np.int64],
        is_last: NDArray[np.bool_] | None = None,
    ) -> None:
        """Record tokens of some rows, and which rows may have finished.

        Args:
            flight: The pass.
            sampled: All draws of the pass.
            draws: Indices of the draws to record, row by row.
            is_last: Whether each of these is the last of its row; None if each row has only one.
        """
        rows, slots = self._run.rows, flight.slots[draws]
        draws_of_rows = sampled.at(draws)
        check_numbers(draws_of_rows.lse, lambda at: self._row_name(slots[at]))
        self._run.usage.decoded_tokens += len(slots)
        verify_input = flight.verify_input if is_last is not None else None
        index = verify_input.index_T[draws] if verify_input is not None else None
        rows.append(slots, draws_of_rows, index, flight.version)
        tokens = draws_of_rows.tokens
        if is_last is not None:
            slots, tokens = slots[is_last], tokens[is_last]
        may_end = self._run.param_sets.may_end(rows.params[slots], tokens)
        ending = may_end | (rows.count[slots] >= rows.limit[slots])
        if self._confidence.used:
            ending |= self._confidence.update(slots)
        if ending.any():
            self._ending.append(slots[ending])

    def _row_name(self, slot: int) -> str:
        rows = self._run.rows
        request = self._run.requests[int(rows.request[slot])].spec
        return f"prompt {request.id!r} sample {rows.sample[slot]} token {rows.count[slot]}"


_MAX_NAMED: Final = 5  # prompts in a message


def translate_error(run: EngineRun, error: Exception) -> Exception:
    """Return the error that the caller sees when `error` has ended a step."""
    if not isinstance(error, TreegenError | torch.OutOfMemoryError):
        try:
            run.model_runner.check()
        except WorkerError as lost:
            return lost  # the lost rank made this process fail too
    if not isinstance(error, torch.OutOfMemoryError):
        return error
    failure = CapacityError(
        f"{run.model.device} has no memory left for a forward pass; use a smaller cache "
        f"({arg('memory=')}), or decode fewer rows at once ({arg('max_rows=')})"
    )
    failure.__cause__ = error
    return failure


def make_stall_error(run: EngineRun) -> InternalError:
    """Return the error for a run in which steps make no progress although work is left."""
    names = [repr(request.spec.id) for request in run.requests.values()]
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return InternalError(
        f"the scheduler cannot continue with prompts {', '.join(names[:_MAX_NAMED])}{more}; "
        "finished samples are kept; please report this error with the command or program"
    )


def check_numbers(lse_S: NDArray[Any], name: Callable[[int], str]) -> None:
    """Raise NumericsError if a log-sum-exp is not finite.

    Args:
        lse_S: Log-sum-exp of each row of logits, [rows].
        name: Returns the prompt and token of a row of logits, for the message.
    """
    bad = ~np.isfinite(lse_S)
    if bad.any():
        raise NumericsError(
            f"the model's logits are not numbers for {name(int(bad.argmax()))}; "
            "finished samples are kept; check the weights or use dtype float32"
        )
