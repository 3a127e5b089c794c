"""A cluster one does not have, simulated event by event: steps, stragglers, failing links, checkpoints and restarts."""

from shoal.estimate.simulate.costs import StepCosts, step_costs
from shoal.estimate.simulate.disturb import CALM, Disturbance, Links, Straggler
from shoal.estimate.simulate.goodput import Goodput, goodput
from shoal.estimate.simulate.step import Step, simulate_step, simulate_steps
from shoal.estimate.simulate.trace import perfetto

__all__ = [
    "CALM",
    "Disturbance",
    "Goodput",
    "Links",
    "Step",
    "StepCosts",
    "Straggler",
    "goodput",
    "perfetto",
    "simulate_step",
    "simulate_steps",
    "step_costs",
]
