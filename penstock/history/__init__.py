"""The history of a run: each sample and its fate, kept in the run's folder after its group left Redis.

| file | content |
|---|---|
| `row.py` | a row for each sample, and the batches that used a sample |
| `packing.py`, `logprobs.py` | compression of arrays |
| `pieces.py` | texts of token ids |
| `bodies.py`, `blocks.py` | the fields of a row that are not searched; those of several rows together, as bytes |
| `text.py` | words of texts, as they are indexed |
| `part.py`, `open_part.py`, `read_part.py` | one SQLite file of a history: its schema; writing it, and reading it |
| `writer.py`, `reader.py` | all files of one recorder; of all recorders |
| `filters.py`, `cursor.py` | which rows are requested, and the page after which they begin |
"""
