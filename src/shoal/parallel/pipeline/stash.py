"""Versions of a stage's weights, for a pipeline that updates them while micro-batches are under way.

A version is a full copy of the stage's flat buffers. A forward holds the version it ran with until its backward is
done; an update writes into buffers that no forward holds. Parameters are made views of a version before they are used:
what autograd has saved is partly the parameter itself, which shows whatever it is a view of now, so a backward needs
its own version in place as much as a recomputation does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.parallel.engine import Engine


class Version:
    """The stage's weights as they were, or are predicted to be, at some time."""

    def __init__(self, engine: Engine, values: list[torch.Tensor]) -> None:
        self.values = values
        """One for each bucket of the engine."""
        self.views = [bucket.buffer.views_of(flat) for bucket, flat in zip(engine.buckets, values, strict=True)]
        self.holders = 0
        """Micro-batches between their forward and their backward with these weights."""


class WeightStash:
    """The newest weights, which the optimiser updates, and older ones that micro-batches still need."""

    def __init__(self, engine: Engine, *, predict: bool) -> None:
        self.engine, self.predict = engine, predict
        self.newest = Version(engine, [bucket.buffer.values for bucket in engine.buckets])
        self.most_versions = 1
        """The most that were alive at a time, the newest included."""
        self._alive = 1
        self._spare: list[Version] = []
        self._attached = self.newest
        self._velocity: list[torch.Tensor] | None = None
        """How far the last update went; None while none has been made, or since it was forgotten."""

    def hold(self, *, updates_ahead: int) -> Version:
        """The version for a forward, in place. With prediction: the weights after that many more updates, each as long
        as the last one (Chen et al. 2018, SpecTrain: w - s * lr * v; here lr * v is what the optimiser did last, so
        that any optimiser with momentum will do)."""
        version = self.newest
        if self.predict and updates_ahead and self._velocity is not None:
            version = self._fresh()
            with torch.no_grad():
                for to, now, velocity in zip(version.values, self.newest.values, self._velocity, strict=True):
                    torch.add(now, velocity, alpha=updates_ahead, out=to)
        version.holders += 1
        self.attach(version)
        return version

    def release(self, version: Version) -> None:
        """After the backward of a micro-batch that held it."""
        version.holders -= 1
        if not version.holders and version is not self.newest:
            self._alive -= 1
            self._spare.append(version)

    def attach(self, version: Version | None = None) -> None:
        """Makes the parameters views of a version; of the newest, if none is named."""
        version = version or self.newest
        if version is self._attached:
            return
        for bucket, views in zip(self.engine.buckets, version.views, strict=True):
            for slot, view in zip(bucket.buffer.slots, views, strict=True):
                slot.param.data = view
        self._attached = version

    def update(self, apply: Callable[[], None]) -> None:
        """Runs the optimiser on the newest weights; versions that are still held stay as they are."""
        with torch.no_grad():
            if self.newest.holders:
                successor = self._fresh()
                for to, now in zip(successor.values, self.newest.values, strict=True):
                    to.copy_(now)
                self._succeed(successor)
            self.attach()
            before = [flat.clone() for flat in self.newest.values] if self.predict else []
            apply()
            if self.predict:
                self._velocity = [now - old for now, old in zip(self.newest.values, before, strict=True)]

    def forget_velocity(self) -> None:
        """Where training may be taken up again from a checkpoint, which has no velocity: it is dropped here too."""
        self._velocity = None

    def _fresh(self) -> Version:
        self._alive += 1
        self.most_versions = max(self.most_versions, self._alive)
        if self._spare:
            return self._spare.pop()
        return Version(self.engine, [torch.empty_like(flat) for flat in self.newest.values])

    def _succeed(self, version: Version) -> None:
        """The engine and its optimiser go on with other buffers."""
        engine, self.newest = self.engine, version
        for place, (bucket, values) in enumerate(zip(engine.buckets, version.values, strict=True)):
            bucket.buffer.values, bucket.buffer.views = values, version.views[place]
            bucket.master = values[bucket.buffer.shard]
        for part in engine.optimizer.slices:
            part.follow_buffer()
