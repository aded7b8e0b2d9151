"""Conversions between penstock and verl: sampling parameters, weight files, images."""
