"""Provide the batches of a run as a plain PyTorch ``IterableDataset``.

with Trainer(run="digits") as trainer:
    data = RolloutDataset(trainer, max_tokens=16384)
    trainer.publish(model)
    for item in DataLoader(data, batch_size=None):
        step(item)
        if item["last"]:                            # the last micro-batch of its batch
            optimizer.step()
            data.commit(item["batch"])
            trainer.publish(model)
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from penstock.consumers.batch import behaviour
from penstock.consumers.batch.batch import Batch
from penstock.consumers.grpo.pictures import add_images
from penstock.consumers.trainer import Trainer
from penstock.errors import ConfigError, ProtocolError


class RolloutDataset(IterableDataset[dict[str, Any]]):
    """Iterate over micro-batches of a trainer's batches, endlessly unless ``num_batches`` is set.

    Args:
        trainer: entered trainer, which publishes, checkpoints and restores as usual.
        max_tokens, max_samples: limits of a micro-batch, including padding; both None: one micro-batch per batch.
        num_batches: number of batches after which to stop; None: unlimited.
        device: device of the tensors; None: host memory.
        temperature: temperature by which the loop divides logits; batches with another temperature are refused. None:
        the loop divides by the ``temperatures`` of the samples.

    Each item is the dict of ``Batch.padded`` plus ``batch`` (its number), ``micro`` (0, 1, ...), ``last`` (True on the
    last micro-batch of its batch), and, for samples with images, the concatenated ``pixel_values`` and
    ``image_grid_thw``. Use ``DataLoader(dataset, batch_size=None)``, as items are already batched. Uncommitted batches
    are read again after a restart, so prefetching loses no data.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        max_tokens: int | None = None,
        max_samples: int | None = None,
        num_batches: int | None = None,
        device: str | None = None,
        temperature: float | None = None,
    ) -> None:
        super().__init__()
        behaviour.check_config(trainer.config)
        self._temperature = temperature
        self.trainer = trainer
        self._limits = (max_tokens, max_samples)
        self._num_batches = num_batches
        self._device = device
        self._open: dict[int, Batch] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield micro-batches. Blocks, with a reported wait (`penstock why`), until the next batch is cut.

        Raises:
            ConfigError: called in a worker process of a DataLoader, or a batch has another temperature than this loop,
            or logprobs from before temperature (T6).
        """
        if get_worker_info() is not None:
            raise ConfigError(
                "A RolloutDataset cannot be read by worker processes of a DataLoader: one subscription has one "
                "reader. Set num_workers=0; Trainer(prefetch=1) fetches ahead instead."
            )
        # Check now instead of at the first item, as the generator starts later.
        return self._items()

    def _items(self) -> Iterator[dict[str, Any]]:
        done = 0
        while self._num_batches is None or done < self._num_batches:
            batch = self.trainer.next()
            self._open[batch.n] = batch
            if self._temperature is not None:
                what = f"batch {batch.n} of {batch.manifest.sub}"
                behaviour.check_temperature(batch.all_rows, self._temperature, what, "this loop's temperature")
            items = list(batch.micro_batches(*self._limits, device=self._device))
            add_images(batch, [items])
            for micro, item in enumerate(items):
                yield item | {"batch": batch.n, "micro": micro, "last": micro == len(items) - 1}
            done += 1

    def commit(self, batch: int) -> None:
        """Commit every batch up to number ``batch``. Blocks for a round trip each. Idempotent.

        Raises ProtocolError for a batch that this dataset has not yielded.
        """
        if batch > self.trainer.position:
            raise ProtocolError(f"Batch {batch} was not handed out yet; the last one was {self.trainer.position}.")
        for n in sorted(n for n in self._open if n <= batch):
            self.trainer.commit(self._open[n])
            del self._open[n]
