"""Lossless deltas between versions of weights: format, store, and chains."""
