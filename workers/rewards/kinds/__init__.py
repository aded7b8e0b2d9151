"""Rewards by name: one noun a file, their table in registry.py."""
