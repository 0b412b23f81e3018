"""Run directories: what a run was asked for, the samples it has finished, and its results."""

from treegen.runs.appended import appending
from treegen.runs.directory import RunDir, SearchRunDir
from treegen.runs.lines import Key
from treegen.runs.records import RecordFile
from treegen.runs.settings import RunInfo, RunSettings, model_identity, versions
from treegen.runs.signals import StopFlag, graceful_signals

__all__ = [
    "Key",
    "RecordFile",
    "RunDir",
    "RunInfo",
    "RunSettings",
    "SearchRunDir",
    "StopFlag",
    "appending",
    "graceful_signals",
    "model_identity",
    "versions",
]
