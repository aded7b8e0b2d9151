"""A model's folder: its settings, tokenizer and image processor."""
