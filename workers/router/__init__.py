"""Several servers behind one address: sglang-router, and the engine that they are together."""
