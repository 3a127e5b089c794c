"""Shoal trains one neural network on many machines by any technique of distributed deep learning.

    run = shoal.train(job, "dp(2, zero=3)")      # job: a shoal.Job, a file, or a built-in name
    model = run.model()
    print(shoal.plan("gpt:1.3b", cluster="dgx-a100", devices=16))

Strategies are ordinary values: `from shoal import dp, tp` and multiply. What needs torch is loaded when asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal import strategy as _strategy
from shoal.strategy import *  # noqa: F403

if TYPE_CHECKING:
    from shoal.api.analyze import NetworkReport, analyze
    from shoal.api.calibrate import CalibrationReport, calibrate
    from shoal.api.compare import Comparison, compare, report, runs
    from shoal.api.doctor import Diagnosis, doctor
    from shoal.api.evaluate import Evaluation, JointEvaluation, evaluate, evaluate_together
    from shoal.api.explain import Explanation, explain
    from shoal.api.explain_run import RunExplanation, explain_run
    from shoal.api.export import ExportedModel, export
    from shoal.api.learn_profile import LearnedProfile, learn_profile
    from shoal.api.plan import PlanReport, plan
    from shoal.api.running import load_run, train, verify
    from shoal.api.running import train as train_job
    from shoal.api.search import Search, search
    from shoal.api.simulate import SimulatedSteps, simulate
    from shoal.api.simulate_servers import SimulatedServers
    from shoal.api.submit import Submission, submit
    from shoal.api.taxonomy import Taxonomy, taxonomy
    from shoal.api.timeline import Timeline
    from shoal.api.tokenize import TokenFolder, tokenize
    from shoal.api.validate import Validation, validate
    from shoal.exporting.trained import full_weights as load_weights
    from shoal.job import Job
    from shoal.job.callbacks import Callback, TrainingState
    from shoal.job.hints import LayoutHints
    from shoal.layout.layout import layout_of
    from shoal.proof.certify import Certificate
    from shoal.training.options import TrainOptions
    from shoal.training.own_loop import engine
    from shoal.training.record.run import Run

__version__ = "0.1.0"

_LATER = {
    "CalibrationReport": "shoal.api.calibrate:CalibrationReport",
    "Comparison": "shoal.api.compare:Comparison",
    "Callback": "shoal.job.callbacks:Callback",
    "Certificate": "shoal.proof.certify:Certificate",
    "Diagnosis": "shoal.api.doctor:Diagnosis",
    "Evaluation": "shoal.api.evaluate:Evaluation",
    "Explanation": "shoal.api.explain:Explanation",
    "ExportedModel": "shoal.api.export:ExportedModel",
    "Job": "shoal.job:Job",
    "JointEvaluation": "shoal.api.evaluate:JointEvaluation",
    "LayoutHints": "shoal.job.hints:LayoutHints",
    "LearnedProfile": "shoal.api.learn_profile:LearnedProfile",
    "NetworkReport": "shoal.api.analyze:NetworkReport",
    "PlanReport": "shoal.api.plan:PlanReport",
    "Run": "shoal.training.record.run:Run",
    "Search": "shoal.api.search:Search",
    "SimulatedServers": "shoal.api.simulate_servers:SimulatedServers",
    "SimulatedSteps": "shoal.api.simulate:SimulatedSteps",
    "Submission": "shoal.api.submit:Submission",
    "Taxonomy": "shoal.api.taxonomy:Taxonomy",
    "Timeline": "shoal.api.timeline:Timeline",
    "TrainOptions": "shoal.training.options:TrainOptions",
    "TrainingState": "shoal.job.callbacks:TrainingState",
    "TokenFolder": "shoal.api.tokenize:TokenFolder",
    "Validation": "shoal.api.validate:Validation",
    "analyze": "shoal.api.analyze:analyze",
    "calibrate": "shoal.api.calibrate:calibrate",
    "compare": "shoal.api.compare:compare",
    "doctor": "shoal.api.doctor:doctor",
    "engine": "shoal.training.own_loop:engine",
    "evaluate": "shoal.api.evaluate:evaluate",
    "evaluate_together": "shoal.api.evaluate:evaluate_together",
    "RunExplanation": "shoal.api.explain_run:RunExplanation",
    "explain": "shoal.api.explain:explain",
    "explain_run": "shoal.api.explain_run:explain_run",
    "export": "shoal.api.export:export",
    "layout_of": "shoal.layout.layout:layout_of",
    "learn_profile": "shoal.api.learn_profile:learn_profile",
    "load_run": "shoal.api.running:load_run",
    "load_weights": "shoal.exporting.trained:full_weights",
    "plan": "shoal.api.plan:plan",
    "report": "shoal.api.compare:report",
    "runs": "shoal.api.compare:runs",
    "search": "shoal.api.search:search",
    "simulate": "shoal.api.simulate:simulate",
    "submit": "shoal.api.submit:submit",
    "taxonomy": "shoal.api.taxonomy:taxonomy",
    "tokenize": "shoal.api.tokenize:tokenize",
    "train": "shoal.api.running:train",
    "train_job": "shoal.api.running:train",
    "validate": "shoal.api.validate:validate",
    "verify": "shoal.api.running:verify",
}

__all__ = [
    "CalibrationReport",
    "Callback",
    "Certificate",
    "Comparison",
    "Diagnosis",
    "Evaluation",
    "Explanation",
    "ExportedModel",
    "Job",
    "JointEvaluation",
    "LayoutHints",
    "LearnedProfile",
    "NetworkReport",
    "PlanReport",
    "Run",
    "RunExplanation",
    "Search",
    "SimulatedServers",
    "SimulatedSteps",
    "Submission",
    "Taxonomy",
    "Timeline",
    "TokenFolder",
    "TrainOptions",
    "TrainingState",
    "Validation",
    "analyze",
    "calibrate",
    "compare",
    "doctor",
    "engine",
    "evaluate",
    "evaluate_together",
    "explain",
    "explain_run",
    "export",
    "layout_of",
    "learn_profile",
    "load_run",
    "load_weights",
    "plan",
    "report",
    "runs",
    "search",
    "simulate",
    "submit",
    "taxonomy",
    "tokenize",
    "train",
    "train_job",
    "validate",
    "verify",
]
__all__ += [name for name in dict.fromkeys([*_strategy.__all__, *_strategy.REGISTRY]) if name not in __all__]


def __getattr__(name: str) -> Any:
    if name in _LATER:
        from importlib import import_module

        module, attribute = _LATER[name].split(":")
        return getattr(import_module(module), attribute)
    if name == "operators":
        from importlib import import_module

        return import_module("shoal.operators")
    if name in _strategy.REGISTRY:
        return _strategy.REGISTRY[name]
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
