"""`shoal.train`, `shoal.verify`, `shoal.load_run`: what trains, and what it leaves."""

from __future__ import annotations

from shoal.api.call import in_keywords
from shoal.proof.certify import verify as _verify
from shoal.training.local import train_job as _train_job
from shoal.training.record.run import read_run as _read_run

__all__ = ["load_run", "train", "verify"]

train = in_keywords(_train_job)
verify = in_keywords(_verify)
load_run = in_keywords(_read_run)
