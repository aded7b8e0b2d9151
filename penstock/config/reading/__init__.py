"""Reading of a configuration: its file, settings on top of it, paths, errors and secrets."""
