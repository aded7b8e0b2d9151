"""What stands between penstock and verl: sampling, weights on their way, images."""
