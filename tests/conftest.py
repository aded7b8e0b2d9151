"""Fixtures that all tests share."""

from tests.integration.redis_fixtures import client, keys, redis_server

__all__ = ["client", "keys", "redis_server"]
