"""Lossless changes of weights between two versions: their bytes, their objects, and chains of them."""
