"""Sequence parallelism gathers the inputs of products; who keeps them saves two gathers a layer and pays in memory."""

from __future__ import annotations

import numpy as np

from shoal.estimate.cost.inputs import Column, Inputs
from shoal.estimate.cost.profile import Profile


def kept_gathers(inputs: Inputs, profile: Profile) -> Column:
    """The part of a layer's gathered inputs that is kept for backward: by a profile that keeps them all of it without a
    pipeline, some in deep ones; none in a crowd, where its tensor parallelism stalls.
    """
    crowd = inputs.devices >= profile.crowd_devices
    alone = (inputs.pp == 1) & ~(crowd & (inputs.tp >= 8) & (inputs.tp <= 16))
    deep = (inputs.pp >= 4) & (inputs.tp <= 16) & ~crowd
    part = np.where(alone, 1.0, np.where(deep, profile.regathered_deep, 0.0))
    keeps = np.asarray(profile.regathered_bytes) > 0
    return np.where((inputs.sequence > 0) & (inputs.tp > 1) & keeps, part, 0.0)
