"""Rewards of whole groups, and the second phase of a job in which they are computed."""
