"""Seeds of samples, for engines with reproducible sampling (``enable-deterministic-inference``)."""

import hashlib


def sample_seed(seed: int, sample: str) -> int:
    """Return the seed of one sample, in 0 .. 2**31 - 1, as a function of run seed and sample id alone.

    SGLang hashes it with the position of each token, so a sample that resumes from its prefix gets the same tokens as
    without the interruption.
    """
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
