"""What became of each sample, kept in a run's folder after its group left Redis.

| file | what it is |
|---|---|
| `row.py` | a row a sample, and where a sample was used |
| `packing.py`, `logprobs.py` | its arrays in few bytes |
| `pieces.py` | what tokens stand for |
| `bodies.py`, `blocks.py` | what of a row nobody looks for; of some rows together, as bytes |
| `text.py` | words of texts, as they are indexed |
| `part.py`, `open_part.py`, `read_part.py` | one file of a history, SQLite: what is in it; as it is written, and read |
| `writer.py`, `reader.py` | all files of one recorder; of all recorders |
| `filters.py`, `cursor.py` | which rows are asked for, and behind which one |
"""
