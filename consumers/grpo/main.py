"""Run the processes of the reference trainer, one per rank, each with its training loop (loop.py).

Rank 0 owns the subscription, publishes, checkpoints and reports. A rank that fails ends the others.
"""

import logging
import os
import signal
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing

from penstock.config import Config
from penstock.consumers.grpo.loop import make_loop
from penstock.consumers.weights.sender import sender_of
from penstock.errors import EXIT_CONFIG, EXIT_INTERRUPT, ConfigError, PenstockError
from penstock.system.keeper import die_with_parent
from penstock.system.logs import set_up
from penstock.system.out_of_memory import trainer_error
from penstock.system.stop import watched_signals

log = logging.getLogger(__name__)


def _rank_main(rank: int, config: Config, store: str) -> None:
    parent = multiprocessing.parent_process()
    die_with_parent(parent.pid if parent else None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    set_up(f"trainer/{rank}", config.run, config.logs.format)
    sys.exit(_run_in_group(config, rank, rank, f"file://{store}"))


def _run_in_group(config: Config, rank: int, local_rank: int, rendezvous: str) -> int:
    """Run one of several ranks, with index ``local_rank`` on this host. Blocks; returns its exit code."""
    backend = "gloo" if config.trainer.device == "cpu" else "nccl"
    if config.trainer.device == "cuda":
        # "cuda" means the current device: set one per rank, or all would share the first.
        torch.cuda.set_device(local_rank)
    try:
        if (sender := sender_of(config.trainer.transport)) is not None:
            sender.set_up()
        size = config.trainer.dp_size
        dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size)
        return _run_rank(config, rank, size)
    except PenstockError as exc:
        # A rank is a separate process, so log the error here.
        log.error("%s", exc)
        return EXIT_CONFIG if isinstance(exc, ConfigError) else 1
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _run_rank(config: Config, rank: int, size: int) -> int:
    try:
        loop = make_loop(config, rank, size)
        # The parent of ranks gets the terminal's Ctrl-C, and forwards it as SIGTERM; torchrun forwards it as SIGINT.
        numbers = (signal.SIGTERM,) if multiprocessing.parent_process() else (signal.SIGTERM, signal.SIGINT)
        with watched_signals(lambda count: loop.stop() if count == 1 else os._exit(EXIT_INTERRUPT), *numbers):
            return loop.run()
    except (RuntimeError, MemoryError) as exc:
        if said := trainer_error(exc, device=config.trainer.device, max_tokens=config.trainer.max_tokens):
            raise said from exc
        raise


def main(config: Config) -> int:
    """Train until all steps are done or the data has ended, then return 0. Blocks.

    Raises ConfigError if torchrun started another number of ranks than ``trainer.dp_size``.
    """
    size = config.trainer.dp_size
    if "TORCHELASTIC_RUN_ID" in os.environ:
        count = int(os.environ["WORLD_SIZE"])
        if count != size:
            raise ConfigError(f"torchrun started {count} ranks, and trainer.dp_size is {size}: set it to {count}.")
        if size > 1:
            return _run_in_group(config, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), "env://")
    if size == 1:
        return _run_rank(config, 0, 1)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        context = multiprocessing.get_context("spawn")
        store = os.path.join(folder, "store")
        ranks = [context.Process(target=_rank_main, args=(rank, config, store)) for rank in range(size)]
        for rank in ranks:
            rank.start()

        def stop(count: int) -> None:
            for rank in ranks:
                if rank.is_alive() and count == 1:
                    rank.terminate()
                elif rank.is_alive():
                    rank.kill()

        with watched_signals(stop, signal.SIGTERM, signal.SIGINT):
            return _join(ranks)


def _join(ranks: list[Any]) -> int:
    """Wait for all ranks; stop the others if a rank fails, because they would wait for it forever.

    A stopped rank does not stop the others: all ranks agreed to stop, and rank 0 may still write the checkpoint.
    """
    while any(rank.is_alive() for rank in ranks):
        for rank in ranks:
            rank.join(0.2)
            if rank.exitcode not in (None, 0, EXIT_INTERRUPT):
                for other in ranks:
                    other.kill()
                log.error("rank %s ended with %s; the others were stopped", rank.name, rank.exitcode)
                return int(rank.exitcode) if rank.exitcode and rank.exitcode > 0 else 1
    return max(int(rank.exitcode or 0) for rank in ranks)
