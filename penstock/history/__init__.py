"""The history of a run: each sample and its fate, kept in the run's folder after its group left Redis.

| file | content |
|---|---|
| `row.py` | a row for each sample, the batches that used it, and the words of its texts that are indexed |
| `blocks.py` | the other fields of several rows, and their arrays, as msgpack and zstandard |
| `part.py`, `read_part.py` | one SQLite file of a history: its schema; writing it, and reading it |
| `writer.py`, `reader.py` | all files of one recorder; of all recorders |
| `filters.py` | which rows are requested, and the page after which they begin |
"""
