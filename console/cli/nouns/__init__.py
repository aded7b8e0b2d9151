"""Verbs of one noun each: its list, one of them, and what can be done to them."""
