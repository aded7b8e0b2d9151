"""Record samples and their fates in files when their groups leave the queue."""
