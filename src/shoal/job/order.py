"""The order of the data: which samples make up the global batch that starts at a sample counter. It is a
function of (seed, counter) and never of the number of ranks, so every strategy sees the same global
batches, a restart needs one integer, and a change of strategy loses no sample. `share` then selects the part of
a global batch for one rank and one micro-batch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from shoal.common.numbers import even_part
from shoal.job.errors import JobError
from shoal.job.large_batch import Growth, batch_at

LastBatch = Literal["wrap", "short"]


class Order:
    """Shuffled epochs of `num_samples`, cut into global batches.

    The samples of all epochs form one endless sequence, and the counter is a position in it. With
    `last_batch="wrap"` every batch is full and may continue into the next epoch (into several, when the batch
    is larger than an epoch); with "short" a batch ends where its epoch does. `growth`: ((counter, batch from there
    on), ...).
    """

    def __init__(
        self, seed: int, num_samples: int, global_batch: int, last_batch: LastBatch = "wrap", growth: Growth = ()
    ) -> None:
        if num_samples < 1:
            raise JobError(f"num_samples is {num_samples}, but an order needs at least one sample")
        if global_batch < 1:
            raise JobError(f"global_batch is {global_batch}, but a batch needs at least one sample")
        if seed < 0:
            raise JobError(f"seed is {seed}, but a seed must be zero or more")
        if last_batch not in ("wrap", "short"):
            raise JobError(f"last_batch is {last_batch!r}, but must be 'wrap' or 'short'")
        self.seed = int(seed)
        self.num_samples = int(num_samples)
        self.global_batch = int(global_batch)
        self.last_batch = last_batch
        self.growth = growth
        self._permutations: dict[int, np.ndarray] = {}

    def permutation(self, epoch: int) -> np.ndarray:
        """The order of the samples within one epoch. The last two stay in memory: a wrapped batch alternates
        between neighbours.
        """
        if epoch not in self._permutations:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            while len(self._permutations) >= 2:
                del self._permutations[next(iter(self._permutations))]
            fresh = generator.permutation(self.num_samples).astype(np.int64, copy=False)
            fresh.flags.writeable = False
            self._permutations[epoch] = fresh
        return self._permutations[epoch]

    def next(self, counter: int) -> int:
        """The counter at which the following global batch starts."""
        counter = _whole(counter)
        end = counter + batch_at(self.growth, self.global_batch, counter)
        return end if self.last_batch == "wrap" else min(end, self._epoch_end(counter))

    def indices(self, counter: int) -> np.ndarray:
        """The samples of the global batch that starts at `counter`, in order."""
        counter = _whole(counter)
        end = self.next(counter)
        pieces = []
        while counter < end:
            epoch, offset = divmod(counter, self.num_samples)
            stop = min(end, self._epoch_end(counter))
            pieces.append(self.permutation(epoch)[offset : offset + stop - counter])
            counter = stop
        return np.concatenate(pieces)

    def _epoch_end(self, counter: int) -> int:
        return (counter // self.num_samples + 1) * self.num_samples


def share(indices: np.ndarray, *, rank: int, ranks: int, micro: int = 0, micros: int = 1) -> np.ndarray:
    """One rank's part of one micro-batch. The batch is split into micro-batches first, then each micro-batch is
    split among the ranks.

    Parts are contiguous and their sizes differ by at most one, larger ones first; with more ranks than samples
    some are empty. Concatenated, micro-batch by micro-batch and rank by rank, they are the global batch again.
    """
    return _piece(_piece(indices, micro, micros, "micro"), rank, ranks, "rank")


def _piece(indices: np.ndarray, which: int, pieces: int, what: str) -> np.ndarray:
    if not 0 <= which < pieces:
        raise JobError(f"{what} is {which}, but must lie in 0..{pieces - 1} ({what}s is {pieces})")
    start, stop = even_part(len(indices), pieces, which)
    return indices[start:stop]


def _whole(counter: int) -> int:
    if counter < 0 or counter != int(counter):
        raise JobError(f"the sample counter is {counter}, but must be a whole number, zero or more")
    return int(counter)
