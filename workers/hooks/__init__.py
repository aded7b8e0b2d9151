"""Functions of the user's that a worker calls: before a sample's reward."""
