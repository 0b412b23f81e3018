"""Tasks whose samples are programs, which are scored by running them in a sandbox."""
