"""How near a run under a strategy must come to the serial one, and the names of what is compared."""

from __future__ import annotations

EXACT = 1e-10
"""Largest relative difference of an exact strategy in float64. Correct ones measure 1e-15, faults 1e-5 and more."""
MARGIN = 100.0
"""The tolerance is this many times the conditioning, where that is more than EXACT. Ranks sum in yet another order;
correct ones were measured at up to 66 times the movement of the serial run (Qwen3-Next under cp(2))."""
WIDEST = 1e-7
"""The widest tolerance: a hundredth of what the smallest planted fault shows. A job that would need more cannot be
proven, whatever its difference is."""
DISTURBANCES = 2
"""Serial runs with another order of sums."""
LOSS, GRADIENT = "loss", "gradient"
