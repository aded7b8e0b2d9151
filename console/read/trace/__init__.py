"""Trace one job, sample, prompt or batch, with times; and everything in a span of time, as tracks.

| file | what it is |
|---|---|
| `job.py` | the trace of one job: attempts, samples, batches, and its events in order |
| `batch.py` | a batch, and the jobs in it |
| `sources.py` | the target (a job, a sample, a prompt, a batch) and where its trace is read |
| `stages.py` | the stages of a sample, from its admission to its step; the trainer's steps |
| `tracks.py`, `perfetto.py` | a span of time, on tracks; as a file for Perfetto |
"""
