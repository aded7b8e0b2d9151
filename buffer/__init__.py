"""The replay buffer: service, state, subscriptions, samplers, staleness, partition."""

if __name__ != "penstock.buffer":
    raise ImportError("Import penstock.buffer: the package buffer is part of penstock.")
