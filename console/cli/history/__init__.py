"""Verbs that show what became of samples: they read a run's history, and Redis where that answers."""
