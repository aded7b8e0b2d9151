"""How a configuration is put together: its file, settings on top of it, paths, mistakes and secrets."""
