"""Manage a trainer's subscription: ownership, manifests, progress."""
