"""The replay buffer: service, state, subscriptions, samplers, staleness, partition."""
