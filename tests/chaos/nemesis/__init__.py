"""Faults by seed: what is done to a run, to whom and when, written down before it is done."""
