"""Call user functions that generate samples, or process a sample before its reward."""
