"""Requests from when they are asked for until their last sample ends."""
