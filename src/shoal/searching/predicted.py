"""What a model would cost on a cluster: predicted step time and memory of a device, before anything is trained."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cluster import BadCluster, Cluster, cluster, read_cluster
from shoal.cluster.presets import THIS
from shoal.estimate.steps.datasheet import machine_of_cluster
from shoal.estimate.steps.read import machine_here
from shoal.searching.options import CannotSearch, SearchOptions
from shoal.strategy import Strategy, parse
from shoal.strategy.terms import amp

if TYPE_CHECKING:
    from shoal.estimate.steps.machine import Machine
    from shoal.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedDevice:
    """Where steps are predicted."""

    machine: Machine
    device_bytes: float
    """Memory of a device."""
    words: str


class Predictor:
    """Seconds of a step and bytes of a device, of a job under the search's strategy."""

    def __init__(self, place: PredictedDevice, strategy: Strategy) -> None:
        self.place, self.strategy = place, strategy

    def __call__(self, job: Job) -> tuple[float, float]:
        from shoal.calibration.job_model import job_model, plane_cuts_of
        from shoal.estimate.steps.price import price_step

        model, _ = job_model(job, planes=plane_cuts_of([self.strategy]))
        found = price_step(model, self.strategy, self.place.machine)
        assert found.step_s is not None
        assert found.memory_bytes is not None
        return found.step_s, float(found.memory_bytes)


def predictor(options: SearchOptions) -> Callable[[Job], tuple[float, float]] | None:
    """What predicts a job's cost; None where none is asked for."""
    if options.cluster is None:
        return None
    strategy = parse(options.strategy)
    return Predictor(place_of(options.cluster, strategy), strategy)


def place_of(name: str, strategy: Strategy) -> PredictedDevice:
    """What steps are predicted by: what was measured here, or the datasheets of a cluster.

    Raises:
        CannotSearch: There is no such cluster, or it has too few devices for the strategy.
    """
    try:
        if name == THIS:
            here = machine_here()
            if here is None:
                raise CannotSearch("--cluster this: this machine has not been calibrated; run `shoal calibrate` first")
            if strategy.world > here.ranks:
                raise CannotSearch(
                    f"--cluster this: the strategy has {strategy.world} ranks, and {here.ranks} were calibrated; run "
                    f"`shoal calibrate --ranks {strategy.world}` first"
                )
            each = here.memory_bytes / here.ranks
            return PredictedDevice(machine=here, device_bytes=each, words="this machine, as calibrated")
        found = _cluster(name)
    except BadCluster as error:
        raise CannotSearch(f"--cluster {name}: {error}") from None
    if strategy.world > found.devices:
        raise CannotSearch(f"--cluster {name} has {found.devices} devices, and {strategy} needs {strategy.world}")
    half = strategy.term(amp)
    machine = machine_of_cluster(found, world=strategy.world, precision=half.dtype if half is not None else "fp32")
    words = f"{found.device.name}, by its datasheet"
    return PredictedDevice(machine=machine, device_bytes=found.device.memory_bytes, words=words)


def _cluster(name: str) -> Cluster:
    file = name.endswith(".toml") or os.sep in name or Path(name).is_file()
    return read_cluster(name) if file else cluster(name)
