"""How long a turn may sweep, in seconds.

Owns: that rule. How much work fits is up to the executor, which always does at least one piece.
"""

from __future__ import annotations

# A stream's gap is one decode step, this many steps of sweeping and the executor's inexactness
# (it stops after a piece, not in it). A decode step beside a sweep takes twice as long as alone,
# because the sweep empties the processor's caches: together under 5 normal steps.
SWEEP_STEPS = 1.0
# Two open sweeps take turns of this many seconds while nobody decodes: short beside a first
# token's time, long beside the cost of a turn.
SWEEP_SLICE = 0.05
# Never ask for less: before the first decode step its time is not known.
SHORTEST_SLICE = 0.001


def sweep_budget(*, decoding: bool, open_sweeps: int, step_seconds: float) -> float | None:
    """Seconds to advance a sweep for; None: until it is done or a message arrives."""
    if decoding:
        return max(SWEEP_STEPS * step_seconds, SHORTEST_SLICE)
    return SWEEP_SLICE if open_sweeps > 1 else None
