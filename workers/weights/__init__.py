"""Weights on their way into an engine."""
