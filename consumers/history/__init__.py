"""The recorder: write samples and their fates to files when their groups leave the queue."""
