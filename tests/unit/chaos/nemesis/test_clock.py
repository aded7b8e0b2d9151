"""How far clocks jump."""

from penstock.payloads.format import PAYLOAD_TTL_S
from tests.chaos.nemesis.clock import JUMPS


def test_a_payload_outlives_the_farthest_that_a_clock_is_set_ahead() -> None:
    """As `router` with seed 76: a server's clock came back to the hour, and payloads of groups that waited expired."""
    assert max(JUMPS) - min(JUMPS) < PAYLOAD_TTL_S
