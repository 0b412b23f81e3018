"""Questions whose answer is the likeliest of given texts (ARC, HellaSwag, WinoGrande, PIQA)."""
