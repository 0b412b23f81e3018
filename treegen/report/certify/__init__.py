"""Certificates: what a number came from, as hashes and settings that other people can check."""
