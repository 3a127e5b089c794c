"""What offload frees and costs: bytes that leave memory, bytes that move in a step, and the seconds that show.

Moving happens beside computing, so a phase takes the longest of what it computes, reads and writes; what cannot overlap
is the first part, which must be there before work on it begins, and the last, which is written after.

    optimiser     update = max(update, S/r, S/w) + (S/r + S/w) / parts
    activations   forward = max(forward, A/w)         backward = max(backward, A/r)
    parameters    forward = max(forward, P/r)         backward = max(backward, P/r)        update: P moves with S

S, A, P: bytes of state, activations and parameters on a rank; r, w: bytes a second from and to the level below.
"""

from __future__ import annotations

from dataclasses import dataclass

HOST_LINK_BYTES_PER_S = 25e9
"""From a device to host memory: assumed, what is usually measured of PCIe 4.0 with 16 lanes (32e9 by its datasheet)."""
PARTS = 64
"""Parts in which a step moves optimiser state, and the buffers that they share."""
BUFFERS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPhases:
    """Seconds of a step of one rank that offloads nothing."""

    forward_s: float
    backward_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadEstimate:
    """What offloading would do to a rank."""

    freed_bytes: float
    """That leave its memory, without what stays in use to move them."""
    moved_bytes: float
    """In a step, both ways together."""
    step_s: float


def offload_estimate(
    phases: StepPhases,
    *,
    state_bytes: float = 0.0,
    activation_bytes: float = 0.0,
    parameter_bytes: float = 0.0,
    in_use_bytes: float = 0.0,
    read_bytes_per_s: float = HOST_LINK_BYTES_PER_S,
    write_bytes_per_s: float = HOST_LINK_BYTES_PER_S,
) -> OffloadEstimate:
    """A rank that offloads what is given. `in_use_bytes`: of the parameters, those that are gathered at once."""
    read, write = read_bytes_per_s, write_bytes_per_s
    with_update = state_bytes + parameter_bytes
    forward_s = max(phases.forward_s, activation_bytes / write, parameter_bytes / read)
    backward_s = max(phases.backward_s, (activation_bytes + parameter_bytes) / read)
    update_s = phases.update_s
    if with_update:
        update_s = max(update_s, with_update / read, with_update / write)
        update_s += (with_update / read + with_update / write) / PARTS
    working = BUFFERS * with_update / PARTS + in_use_bytes
    return OffloadEstimate(
        freed_bytes=state_bytes + activation_bytes + parameter_bytes - working,
        moved_bytes=2 * with_update + 2 * activation_bytes + 2 * parameter_bytes,
        step_s=forward_s + backward_s + update_s,
    )
