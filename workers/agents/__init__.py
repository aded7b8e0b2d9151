"""Samples that agents outside the workers run, over HTTP, and environments that speak in chat messages."""
