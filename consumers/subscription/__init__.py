"""A trainer's named place at the buffer: who holds it, what it was handed, what it has behind it."""
