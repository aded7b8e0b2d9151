"""Several servers behind one address: sglang-router, and the engine they form together."""
