"""How long a turn may sweep, in seconds.

Owns: that rule. How much work fits is up to the executor, which always does at least one piece.
"""

from __future__ import annotations

# What a stream may notice of a sweep beside it: from one token to the next at most this many of
# its normal steps, one decode step included. The executor stops after a piece of work, not in it,
# so the largest gap is a little more.
GAP_STEPS = 2.5
GAP_STEPS_ON_GPU = 2.6  # its pieces are short against a step, so that little comes on top
# A sweep goes on even where a decode step beside it takes that long by itself (on a CPU a sweep
# empties the caches), by this many steps at least.
LEAST_STEPS = 0.35
# Two open sweeps take turns of this many seconds while nobody decodes: short beside a first
# token's time, long beside the cost of a turn.
SWEEP_SLICE = 0.05
# Never ask for less: before the first decode step its time is not known.
SHORTEST_SLICE = 0.001


def sweep_budget(
    *,
    decoding: bool,
    open_sweeps: int,
    step_seconds: float,
    beside_seconds: float,
    gap_steps: float = GAP_STEPS,
) -> float | None:
    """Seconds to advance a sweep for; None: until it is done or a message arrives.

    `step_seconds` is how long a decode step takes by itself, `beside_seconds` beside a sweep.
    """
    if decoding:
        left = gap_steps * step_seconds - max(beside_seconds, step_seconds)
        return max(left, LEAST_STEPS * step_seconds, SHORTEST_SLICE)
    return SWEEP_SLICE if open_sweeps > 1 else None
