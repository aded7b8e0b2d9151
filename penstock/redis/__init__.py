"""Connections to Redis, and a Redis of our own."""
