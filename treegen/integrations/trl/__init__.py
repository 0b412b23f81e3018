"""Rollouts of TRL's trainers on the trainer's own weights.

Use it by `rollout_func=treegen.integrations.trl.rollout`.

rollouts.py  the rollout function, and one with options
settings.py  converts the trainer's settings to sampling parameters
tree.py      what the samples of a rollout share
"""

from treegen.integrations.trl.rollouts import RolloutResult, Rollouts, rollout
from treegen.integrations.trl.tree import RolloutTree, Segment

__all__ = ["RolloutResult", "RolloutTree", "Rollouts", "Segment", "rollout"]
