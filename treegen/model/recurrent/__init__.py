"""Recurrent layers, on states that are kept in slots."""
