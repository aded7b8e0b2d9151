"""Load weights into engines."""
