"""Convert sampling parameters, weight files and images between penstock and verl."""
