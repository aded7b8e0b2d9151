"""Where a trainer's figures are shown: TensorBoard, W&B, trackio, MLflow, each by its own library."""
