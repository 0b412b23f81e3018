"""Models that judge samples: rubrics, verdicts, their storage and their statistics.

jinja2, scipy and choix (the extra `judge`) are imported only where they are used.
"""
