"""Built-in rewards: one file for each, their table in registry.py."""
