"""Functions of the user's at named places of a run: their signatures, and what those of slime's form are given."""
