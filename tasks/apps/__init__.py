"""Programs, run on hidden tests (APPS)."""
