"""Random tokens for leases, leadership, ownership, and revisions of payload servers."""

import secrets


def new_token() -> str:
    """Return 96 random bits: a counter could repeat a value after a failover, but this cannot."""
    return secrets.token_hex(12)
