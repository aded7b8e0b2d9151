"""Ways of weights into an engine beside the folder, the worker's side: one file each (docs/consumers.md)."""
