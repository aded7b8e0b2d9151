"""Trace one job, sample, prompt or batch, with times; and everything in a span of time, as tracks.

| file | what it is |
|---|---|
| `asked.py` | the target: a job, a sample, a prompt, a batch |
| `job.py` | the trace of one job: attempts, samples, batches, and its events in order |
| `batch.py` | a batch, and the jobs in it |
| `sources.py`, `steps.py` | the sources; the trainer's steps, from the files of a run |
| `stages.py` | the stages of a sample, from its admission to its step |
| `tracks.py`, `perfetto.py` | a span of time, on tracks; as a file for Perfetto |
"""
