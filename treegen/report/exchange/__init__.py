"""Export of runs to the formats of other tools, and import of their logs as runs.

    export_run    a run as an Inspect log, lm-eval's files,       export.py, to_*.py
      |           those of Every Eval Ever, or Parquet
    ExportedRun   a run with its prompts, as all formats take it  export.py
    import_log    an Inspect or lm-eval log as run directories    importer.py, from_*.py
      |
    ExternalLog   the content of a log of any tool                external_log.py

inspect_ai is imported where it is used.
"""

from treegen.report.exchange.export import FORMATS, export_run
from treegen.report.exchange.importer import import_log

__all__ = ["FORMATS", "export_run", "import_log"]
