"""Evaluation tasks: data, a prompt tree and a score each; this is treegen.tasks."""

from treegen.tasks.base import Problem, Skipped, Task, TaskData, TaskDefaults, TaskOptions
from treegen.tasks.registry import TaskInfo, get_task, list_tasks
from treegen.tasks.report import (
    Incomplete,
    MajorityRow,
    MetricRow,
    Report,
    ReportOptions,
    summarise,
)
from treegen.tasks.verdict import SampleScore, Verdict
from treegen.tasks.votes import Vote, majority

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
    "majority",
    "summarise",
]
