"""Experiment trackers for a trainer's figures: TensorBoard, W&B, trackio, MLflow, each with its own library."""
