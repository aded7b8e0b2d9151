"""Serve episodes to agents over HTTP with the APIs of OpenAI and Anthropic."""
