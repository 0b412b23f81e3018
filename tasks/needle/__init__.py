"""Facts hidden in a long text: needle in a haystack, RULER."""
