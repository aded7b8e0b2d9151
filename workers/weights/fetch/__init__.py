"""Versions of weights that come over HTTP, from the trainer and from other workers, into a folder of this machine."""
