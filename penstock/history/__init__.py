"""What became of each sample, kept in a run's folder after its group left Redis.

| file | what it is |
|---|---|
| `row.py` | a row a sample, and where a sample was used |
| `packing.py` | its arrays and texts in few bytes |
| `bodies.py` | what of a row nobody looks for, as one value |
| `text.py` | words of texts, as they are indexed |
| `part.py` | one file of a history: SQLite |
| `writer.py` | all files of one recorder |
"""
