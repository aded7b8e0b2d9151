"""What trainers and scorers have done, counted for whoever scrapes it."""
