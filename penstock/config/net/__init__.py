"""Sections of servers and network notifications."""
