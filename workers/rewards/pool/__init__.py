"""The verifier pool: its client, its wire, its workers."""
