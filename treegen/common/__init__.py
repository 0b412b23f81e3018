"""Types and helpers that any package may use: parameters, outputs, devices, files, formatting."""
