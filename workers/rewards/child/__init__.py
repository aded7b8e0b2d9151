"""The process of a worker's own in which rewards given by import path run (``reward.own_process``)."""
