"""Experiment trackers for a trainer's figures: TensorBoard, W&B and trackio, each with its own library."""
