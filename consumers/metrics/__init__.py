"""Export Prometheus metrics of trainers, scorers and the recorder."""
