"""Programs, judged on hidden tests (APPS)."""
