"""Fetch versions of weights over HTTP, from the trainer and other workers, into a folder of this machine."""
