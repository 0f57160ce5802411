"""The policies that ship, by name. No torch.

`POLICIES[name](layers, experts, options)` makes one; an option it does not know is a ConfigError.
Belady's optimum is not among them: it needs the future (see `policies.belady`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from moestro.errors import ConfigError
from moestro.expert_cache.policies.activation_aware import ActivationAware
from moestro.expert_cache.policies.lfu import Lfu
from moestro.expert_cache.policies.lru import Lru
from moestro.expert_cache.policies.lru_frequency import LruFrequency
from moestro.expert_cache.policies.pinned import Pinned
from moestro.expert_cache.policies.predictive import Predictive
from moestro.expert_cache.policies.score import Score
from moestro.expert_cache.policy import Policy

Factory = Callable[[int, int, Mapping[str, Any]], Policy]


def _factory(kind: Callable[..., Policy], name: str) -> Factory:
    known = [
        parameter.name
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]

    def build(layers: int, experts: int, options: Mapping[str, Any]) -> Policy:
        for option in options:
            if option not in known:
                raise ConfigError(
                    f"the {name} policy has no option {option!r}; it has {known or 'none'}"
                )
        return kind(layers, experts, **options)

    return build


POLICIES: Mapping[str, Factory] = {
    kind.name: _factory(kind, kind.name)
    for kind in (Lru, Lfu, LruFrequency, Score, ActivationAware, Pinned, Predictive)
}


def make_policy(
    name: str, layers: int, experts: int, options: Mapping[str, Any] | None = None
) -> Policy:
    """The policy called `name`; ConfigError names the nearest known one."""
    if name not in POLICIES:
        near = get_close_matches(name, POLICIES, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no expert policy {name!r}, only {', '.join(POLICIES)}{hint}")
    return POLICIES[name](layers, experts, options or {})
