"""Fixtures of the integration tests."""

from tests.integration.engine_fixtures import engine, engine_url, model_config, models, publications
from tests.integration.fake_fixtures import config, fake

__all__ = ["config", "engine", "engine_url", "fake", "model_config", "models", "publications"]
