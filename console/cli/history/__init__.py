"""Commands about samples: they read a run's history, and its Redis if that answers."""
