"""User functions that a worker calls: to generate samples, and before a sample's reward."""
