"""The verifier pool: its client, its messages, its workers."""
