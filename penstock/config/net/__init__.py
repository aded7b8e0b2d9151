"""Sections of what listens, and of what is told over the network."""
