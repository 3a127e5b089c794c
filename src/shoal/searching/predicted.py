"""What a model would cost on a cluster: predicted step time and memory of a device, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.searching.options import CannotSearch, SearchOptions

if TYPE_CHECKING:
    from shoal.estimate.steps.machine import Machine
    from shoal.job import Job

THIS = "this"


def predictor(options: SearchOptions) -> Callable[[Job], tuple[float, float]] | None:
    """(seconds of a step, bytes of a device) of a job under the search's strategy; None where none is asked for."""
    if options.cluster is None:
        return None
    from shoal.calibration.job_model import job_model, plane_cuts_of
    from shoal.estimate.steps.price import price_step
    from shoal.strategy import parse

    machine, strategy = machine_of(options.cluster), parse(options.strategy)

    def predict(job: Job) -> tuple[float, float]:
        model, _ = job_model(job, planes=plane_cuts_of([strategy]))
        found = price_step(model, strategy, machine)
        assert found.step_s is not None
        assert found.memory_bytes is not None
        return found.step_s, float(found.memory_bytes)

    return predict


def machine_of(cluster: str) -> Machine:
    """What steps are predicted by: what was measured here, or the datasheet of a cluster's device."""
    from shoal.estimate.steps.read import machine_here

    if cluster != THIS:
        raise CannotSearch(f"--cluster {cluster}: expected {THIS}")
    machine = machine_here()
    if machine is None:
        raise CannotSearch("--cluster this: this machine has not been calibrated; run `shoal calibrate` first")
    return machine
