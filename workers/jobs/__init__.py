"""One leased job from its lease to its commit."""
