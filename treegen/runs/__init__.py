"""Run directories: the settings of a run, its finished samples, and its results."""

from treegen.common.signals import StopFlag, graceful_signals
from treegen.runs.directory import RunDir, SearchRunDir
from treegen.runs.record_file import RecordFile, open_for_append
from treegen.runs.record_format import Key
from treegen.runs.settings import RunInfo, RunSettings, model_identity, versions

__all__ = [
    "Key",
    "RecordFile",
    "RunDir",
    "RunInfo",
    "RunSettings",
    "SearchRunDir",
    "StopFlag",
    "graceful_signals",
    "model_identity",
    "open_for_append",
    "versions",
]
