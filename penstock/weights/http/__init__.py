"""Weights over HTTP, as trainers and workers serve them: ranges of immutable files, for who has the run's token."""
