"""What became of one job, sample, prompt or batch, and when; and all of a span of time, as tracks.

| file | what it is |
|---|---|
| `asked.py` | what a person names: a job, a sample, a prompt, a batch |
| `job.py` | the trace of one job: tries, samples, batches, and its events in their order |
| `batch.py` | a batch, and the jobs in it |
| `sources.py`, `steps.py` | where it is read from; the trainer's steps, from the files of a run |
| `stages.py` | the stages of a sample, from its admission to its step |
| `tracks.py`, `perfetto.py` | what happened in a span of time, on tracks; as a file for Perfetto |
"""
