"""Ways of weights to engines beside the folder, the trainer's side: one file each (docs/consumers.md)."""
