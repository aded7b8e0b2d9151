"""The recorder: what becomes of samples, kept in files when their groups leave the queue."""
