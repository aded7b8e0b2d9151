"""Adapt environments of other packages through their own classes."""
