"""Fixtures of the tests with programs of others: those of the integration tests."""

from tests.integration.engine_fixtures import engine_url, model_config, models, publications

__all__ = ["engine_url", "model_config", "models", "publications"]
