"""Fixtures of the integration tests."""

from tests.integration.engine_fixtures import engine, engine_url, model_config, models, publications

__all__ = ["engine", "engine_url", "model_config", "models", "publications"]
