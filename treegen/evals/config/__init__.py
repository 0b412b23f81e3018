"""What a run was asked for."""
