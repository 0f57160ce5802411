"""Reads which layers of a model see a window only.

Owns: what layer_types and sliding_window of a config.json mean together. What a family takes for
granted when they are absent, it says itself.
"""

from __future__ import annotations

from collections.abc import Callable

from moestro.engine.models.hf_config import HFConfig
from moestro.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"


def read_windows(
    config: HFConfig, layers: int, default: int | None, slides: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """The window of each of `layers` layers in tokens, None where a layer sees all.

    `default` is the window when the config has none; `slides` says which layers have it when there
    is no layer_types.
    """
    types = config.get("layer_types")
    if types is None:
        types = [SLIDING if slides(layer) else FULL for layer in range(layers)]
    if not isinstance(types, list) or len(types) != layers:
        raise ModelError(f"config.json: layer_types must be a list of {layers} kinds, is {types!r}")
    config.require_all("layer_types", FULL, SLIDING)
    window = None if config.is_null("sliding_window") else default
    if config.get("sliding_window") is not None:
        window = config.number("sliding_window")
    if window is None and SLIDING in types:
        raise ModelError("config.json: layer_types has sliding_attention, but no sliding_window")
    return tuple(window if kind == SLIDING else None for kind in types)
