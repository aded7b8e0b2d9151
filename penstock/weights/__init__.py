"""Weights in files: indices, headers, checksums."""
