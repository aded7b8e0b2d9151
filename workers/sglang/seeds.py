"""Seeds of samples, for engines that draw the same tokens again (``enable-deterministic-inference``)."""

import hashlib


def sample_seed(seed: int, sample: str) -> int:
    """A seed for one sample, in 0 .. 2**31 - 1: the same for the same run seed and sample id, wherever it is drawn.

    SGLang hashes it with the position of each token, so a sample that goes on from its prefix draws what it would have
    drawn without the interruption.
    """
    digest = hashlib.blake2b(f"{seed}/{sample}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
