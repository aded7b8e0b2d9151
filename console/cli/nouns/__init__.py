"""Commands of one noun each: list, show, and change."""
