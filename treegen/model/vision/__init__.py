"""Models that take images: image processors and vision towers."""
