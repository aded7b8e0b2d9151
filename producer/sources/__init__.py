"""Data sources, each of which reads rows by number."""
