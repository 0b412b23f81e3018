"""Opening, replacing and naming files."""
