"""Runs in other people's formats, and other people's logs as runs.

    export_run    a run as an Inspect log, lm-eval's files,       export.py, to_*.py
      |           those of Every Eval Ever, or Parquet
    ExportedRun      a run with its prompts, as all formats take it  whole.py
    import_log    an Inspect or lm-eval log as run directories    bring.py, from_*.py
      |
    ExternalLog    what a log has, whichever tool wrote it         foreign.py

inspect_ai is imported where it is used.
"""

from treegen.report.exchange.export import FORMATS, export_run
from treegen.report.exchange.importer import import_log

__all__ = ["FORMATS", "export_run", "import_log"]
