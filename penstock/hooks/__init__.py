"""The user's functions at named places of a run: their signatures, and the arguments of those of slime's form."""
