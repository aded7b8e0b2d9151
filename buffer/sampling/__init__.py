"""Which groups a batch takes, and how many."""
