"""How far a run is, how it went, and what it cost."""
