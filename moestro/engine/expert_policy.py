"""Which policy the expert cache has, from start to end. Owns: making it, and the file in which it
keeps what it learned. Does not own: what a policy decides (`expert_cache.policies`).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from moestro.config import Config
from moestro.errors import ConfigError
from moestro.expert_cache.policies import make_policy
from moestro.expert_cache.policy import Policy


class PolicyKeeper:
    """Makes policies for one model, and saves the one that is in use."""

    def __init__(self, config: Config, layers: int, experts: int, model: Path) -> None:
        """Make the policy that the configuration names. Raises ConfigError, also for its file."""
        self._file = config.expert_policy_state
        self._shape = (layers, experts)
        self._model = model
        self.policy = self.make(config.expert_policy)
        if self._file is not None and not self.policy.wants_sequences:
            raise ConfigError(
                f"--expert-policy-state: the {config.expert_policy} policy keeps nothing",
                param="expert_policy_state",
            )

    def make(self, name: str) -> Policy:
        """A policy with what it learned in earlier runs. Raises ConfigError, and then nothing has
        changed."""
        policy = make_policy(name, *self._shape)
        path = self._path(policy)
        if path is not None:
            if path.exists():
                policy.load(path)
            path.parent.mkdir(parents=True, exist_ok=True)  # now: a wrong path should not wait
        return policy

    def use(self, policy: Policy) -> None:
        """From now on `policy` is in use; `save` the one before first."""
        self.policy = policy

    def save(self) -> None:
        """Keep what the policy learned."""
        path = self._path(self.policy)
        if path is not None:
            self.policy.save(path)

    def _path(self, policy: Policy) -> Path | None:
        if not policy.wants_sequences:
            return None
        return self._file or (_state_file(policy.name, self._model) if policy.records else None)


def _state_file(policy: str, model: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(str(model.resolve()).encode()).hexdigest()[:16]
    return cache / "moestro" / f"{policy}-{name}.npz"
