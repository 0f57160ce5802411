"""What is set, and what of it can change while the server runs. Owns: which settings are live, the
limits of their new values, and changing several of them all together or not at all.

Does not own: the wire (`config_routes`), or what a setting does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from moestro.config import SECRET, Config, nearest
from moestro.engine.messages import Tuning
from moestro.errors import InvalidRequest
from moestro.log import about, set_level
from moestro.server.engine_port import Engine
from moestro.server.settings import ServerSettings

log = logging.getLogger(__name__)

# Live settings, and what the HTTP side calls them when it has them.
LIVE: Mapping[str, str | None] = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batch_seqs": "max_num_batch_seqs",
    "max_num_queued": None,
    "expert_policy": None,
    "rate_limit": "rate_limit",
    "max_request_body": "max_request_body",
    "request_timeout": "request_timeout",
    "send_timeout": "send_timeout",
    "sse_keep_alive_interval": "ping_interval",
    "accept_any_model": "accept_any_model",
    "log_level": None,
    "log_requests": "log_requests",
}
SEATS = ("max_num_seqs", "max_num_batch_seqs")  # at most what memory was planned for


class LiveConfig:
    """The settings of a server. `settings` is what holds now; whoever keeps a copy keeps old ones.

    `on_change` is called with new settings; it may not fail.
    """

    def __init__(self, settings: ServerSettings, engine: Engine, config: Config | None) -> None:
        """Without `config` the settings are all there is."""
        self.settings = settings
        self._engine = engine
        self._config = config or _config_of(settings)
        self.planned_seqs = self._config.max_num_seqs
        self.on_change: list[Callable[[ServerSettings], None]] = []
        self._lock = asyncio.Lock()

    def values(self) -> dict[str, Any]:
        """Every setting that is no secret, as it holds: sizes that the engine chose included."""
        shown = self._config.model_dump(mode="json", exclude=set(SECRET))
        shown["served_model_name"] = list(self.settings.served_model_names)
        shown["max_num_batch_seqs"] = self.settings.batch_seqs
        info = self._engine.info
        if info is not None:
            shown["max_model_len"] = info.max_model_len
            shown["kv_cache_tokens"] = info.kv_tokens
            shown["expert_slots"] = info.expert_slots
        return shown

    def most(self, name: str) -> int | None:
        """The largest value that a live setting can take, where that is not known from its type."""
        return self.planned_seqs if name in SEATS else None

    async def change(self, asked: Mapping[str, Any], who: str, request_id: str | None) -> None:
        """Change settings, all or none. `who` and `request_id` are for the log.

        Raises InvalidRequest that names the setting and its limit, Unavailable when the engine
        cannot be told.
        """
        if not asked:
            raise InvalidRequest("No setting was named.")
        async with self._lock:
            config = self._checked(asked)
            before = self._config
            if _tuning(config) != _tuning(before) or (
                config.max_num_queued != before.max_num_queued
            ):
                await self._engine.tune(_tuning(config), config.max_num_queued)
            self._config = config
            self.settings = _with(self.settings, config)
            set_level(config.log_level) if config.log_level != before.log_level else None
            for hook in self.on_change:
                hook(self.settings)
        told = [
            f"{name} {getattr(before, name)} -> {getattr(config, name)}" for name in sorted(asked)
        ]
        # A warning, so that it is in the log whatever level is set.
        log.warning("settings changed by %s: %s", who, ", ".join(told), extra=about(request_id))

    def _checked(self, asked: Mapping[str, Any]) -> Config:
        for name in asked:
            if name not in Config.model_fields:
                near = nearest(name, LIVE) if len(name) <= 64 else ""
                raise InvalidRequest(f"There is no setting '{name[:64]}'{near}.", param=name[:64])
            if name not in LIVE:
                raise InvalidRequest(
                    f"'{name}' cannot change while the server runs; what can: {', '.join(LIVE)}.",
                    param=name,
                )
        try:
            now = {name: getattr(self._config, name) for name in Config.model_fields}
            config = Config.model_validate({**now, **asked})
        except ValidationError as error:
            raise _explained(error) from None
        for name in SEATS:
            value = getattr(config, name)
            if name in asked and value is not None and value > self.planned_seqs:
                raise InvalidRequest(
                    f"'{name}' can be {self.planned_seqs} at most: for so many sequences memory "
                    "was planned at the start.",
                    param=name,
                )
        return config


def _tuning(config: Config) -> Tuning:
    return Tuning(config.max_num_seqs, config.expert_policy, config.log_level)


def _with(settings: ServerSettings, config: Config) -> ServerSettings:
    changes = {theirs: getattr(config, name) for name, theirs in LIVE.items() if theirs}
    return dataclasses.replace(settings, **changes)


def _config_of(settings: ServerSettings) -> Config:
    return Config(**{n: getattr(settings, theirs) for n, theirs in LIVE.items() if theirs})


def _explained(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    reason = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return InvalidRequest(f"'{name}' should be {reason}.", param=name)
