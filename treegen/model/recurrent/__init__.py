"""Recurrent layers that read and write their states in state slots."""
