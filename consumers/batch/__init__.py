"""A cut batch on its way to the trainer: read, checked, laid out, recorded."""
