"""Random tokens that prove a right, or that something was seen: leases, leadership, ownership, payload servers."""

import secrets


def new_token() -> str:
    """96 random bits: after a failover nothing that counts can come back to an old value, but this cannot repeat."""
    return secrets.token_hex(12)
