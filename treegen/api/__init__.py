"""The Python interface: evaluate, search, judge and open runs."""
