"""Read the state of a run as rows of plain values: one file per noun, for every command and view that shows it."""
