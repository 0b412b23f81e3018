"""Requests: admission, preemption, results of passes, and finished samples."""
