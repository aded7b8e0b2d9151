"""What is there in a run, as rows of plain values: one file per noun, for every verb and view that shows it."""
