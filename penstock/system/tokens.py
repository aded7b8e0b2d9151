"""Random tokens that prove a right: leases, leadership, ownership."""

import secrets


def new_token() -> str:
    """96 random bits: after a failover nothing that counts can come back to an old value, but this cannot repeat."""
    return secrets.token_hex(12)
