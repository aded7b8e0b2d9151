"""Conversations with a model that uses tools: their tokens, and how its answers are read."""
