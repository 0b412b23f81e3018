"""New weights for a model that several processes compute together.

Rank 0 checks all weights, and saves those that are in memory. Between two steps, each rank then
reads its shard from the checkpoint.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from treegen.errors import CapacityError, arg
from treegen.model.model import Model
from treegen.model.parallel.ranks import RankLeader, Ranks
from treegen.model.training.weight_updates import (
    NewWeights,
    StagedWeights,
    save_whole,
    stage_weights,
)


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """New weights that fit a tensor-parallel model."""

    model: Model
    """The model of rank 0."""
    path: Path
    """The checkpoint that has them."""
    fingerprint: str
    """As `Model.fingerprint`."""

    def write(self) -> None:
        """Make each rank read its shard and copy it into the old weights.

        Raises:
            WorkerError: a rank fails.
        """
        ranks, leader = _ranks_of(self.model)
        leader.call_followers("update", self.path)
        try:
            write_shard(self.model, self.path)
            ranks.all_reduce_min(1)  # wait, because the checkpoint may be removed or changed now
        except BaseException as error:
            leader.fail(f"rank 0 failed in an update: {type(error).__name__}: {error}")
            if isinstance(error, Exception):
                leader.check()
            raise


def write_shard(model: Model, path: Path) -> None:
    """Copy this rank's shard of a checkpoint, which rank 0 has checked, into a model's weights."""
    stage_weights(model, path, check_finite=False).write()


def stage_update(
    model: Model, weights: NewWeights, *, check_finite: bool = True
) -> StagedWeights | SharedWeights:
    """Check new weights against those of a model, which stay as they are.

    Args:
        model: The model; of rank 0, if several processes compute it.
        weights: As for `LLM.update`.
        check_finite: Whether to refuse NaN and infinities, as `LLM.update` does.

    Raises:
        InputError: the weights do not fit the model.
        ModelError: the model's weights cannot be updated, or the checkpoint cannot be read.
        CapacityError: the new weights in FP8 do not fit next to the old ones.
        WorkerError: a rank has failed.
    """
    try:
        if model.ranks is None:
            return stage_weights(model, weights, check_finite=check_finite)
        _, leader = _ranks_of(model)
        leader.check()
        saved = leader.folder / "weights"
        shutil.rmtree(saved, ignore_errors=True)
        digest = save_whole(model, weights, saved, check_finite=check_finite)
        path = Path(weights) if isinstance(weights, str | os.PathLike) else saved
        return SharedWeights(model, path, digest)
    except torch.OutOfMemoryError:
        pass  # raise outside this block, which keeps the new weights
    raise CapacityError(
        f"{model.device} has no memory left to check the new weights next to the old ones; "
        f"pass the weights on the CPU, or set a smaller cache ({arg('memory=')})"
    )


def _ranks_of(model: Model) -> tuple[Ranks, RankLeader]:
    """Return the ranks of a tensor-parallel model, and their control."""
    assert model.ranks is not None and model.ranks.leader is not None, "only rank 0 updates weights"
    return model.ranks, model.ranks.leader
