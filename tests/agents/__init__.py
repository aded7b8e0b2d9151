"""Programs of frameworks for agents, run in an environment of their own."""
