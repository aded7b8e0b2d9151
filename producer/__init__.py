"""Data sources, chat templates, the gate, admission."""
