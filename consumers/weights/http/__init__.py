"""Published versions over HTTP: the trainer's side."""
