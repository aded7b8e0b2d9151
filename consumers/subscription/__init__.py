"""A trainer's subscription: its owner, its manifests, its progress."""
