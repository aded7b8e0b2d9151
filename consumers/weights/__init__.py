"""Weights on their way out of the trainer."""
