"""Tests. One thread per process for torch and BLAS: idle threads of many processes spin on the same few cores."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
