"""Which scheme runs which term."""

from __future__ import annotations

from shoal.parallel.sync.local import LocalSteps
from shoal.parallel.sync.outer import OuterLevel
from shoal.strategy.terms.sync import SyncTerm, local

SCHEMES: dict[type[SyncTerm], type[OuterLevel]] = {local: LocalSteps}
