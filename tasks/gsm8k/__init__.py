"""Grade-school mathematics (GSM8K)."""
