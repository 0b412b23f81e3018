"""Evaluation tasks: data, a prompt tree and a score each; installed as treegen.tasks."""

from treegen.evals.problem import Problem, Skipped
from treegen.evals.registry import TaskInfo, get_task, list_tasks
from treegen.evals.selection import select
from treegen.evals.statistics.metrics import (
    Incomplete,
    MajorityRow,
    MetricRow,
    Report,
    ReportOptions,
    summarize,
)
from treegen.evals.statistics.votes import Vote, majority_vote
from treegen.evals.task import Task, TaskData, TaskDefaults, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict

__all__ = [
    "Incomplete",
    "MajorityRow",
    "MetricRow",
    "Problem",
    "Report",
    "ReportOptions",
    "SampleScore",
    "Skipped",
    "Task",
    "TaskData",
    "TaskDefaults",
    "TaskInfo",
    "TaskOptions",
    "Verdict",
    "Vote",
    "get_task",
    "list_tasks",
    "majority_vote",
    "select",
    "summarize",
]
