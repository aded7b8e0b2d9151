"""Weights in files: indices, headers, the folder of a model."""
