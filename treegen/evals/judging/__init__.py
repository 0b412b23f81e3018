"""Samples judged by models: rubrics, verdicts, how they are stored, and what they come to.

jinja2, scipy and choix (the extra `judge`) are imported where they are used.
"""
