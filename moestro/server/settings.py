"""What the HTTP side needs to know, as frozen values that the command line fills in.

Owns: the server's own settings, the checkpoint's sampling defaults and uvicorn's options.
Does not own: the engine's configuration, or where these values come from.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moestro.errors import ModelError


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling values that the checkpoint's author chose; a request's own value wins."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: tuple[int, ...] = ()

    @staticmethod
    def from_checkpoint(folder: Path) -> GenerationDefaults:
        """Read `generation_config.json`; without one every value is the API's default.

        Raises `ModelError` when the file is not what transformers writes.
        """
        path = folder / "generation_config.json"
        if not path.is_file():
            return GenerationDefaults()
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            return GenerationDefaults(
                temperature=_number(raw, "temperature"),
                top_p=_number(raw, "top_p"),
                top_k=_integer(raw, "top_k"),
                min_p=_number(raw, "min_p"),
                repetition_penalty=_number(raw, "repetition_penalty"),
                eos_token_ids=_ids(raw.get("eos_token_id")),
            )
        except (ValueError, AttributeError) as exc:
            raise ModelError(f"generation_config.json cannot be read: {exc}") from exc


def _number(raw: Mapping[str, Any], key: str) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{key} is not a number")
    return float(value)


def _integer(raw: Mapping[str, Any], key: str) -> int | None:
    value = _number(raw, key)
    if value is not None and value != int(value):
        raise ValueError(f"{key} is not a whole number")
    return None if value is None else int(value)


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in listed):
        raise ValueError("eos_token_id is not a token id or a list of them")
    return tuple(listed)


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything the HTTP side is told. Times in seconds, sizes in bytes."""

    served_model_names: tuple[str, ...]
    """Names under which the model answers; the first is the one shown when none was asked for."""
    model_path: str = ""
    """Shown as `root` in the model list."""
    api_key_hashes: tuple[bytes, ...] = ()
    """SHA-256 digests of the accepted keys (see `auth.hash_key`); empty = no key needed."""
    api_key_file: Path | None = None
    """More keys; see `keys.KeyRing`."""
    rate_limit: int | None = None
    """Requests a minute for each key, or for each client address when there are no keys."""
    request_timeout: float = 0.0
    """A generating request that takes longer, waiting included, is ended; 0 = none is."""
    max_num_seqs: int = 64
    """Sequences that the engine runs at the same time."""
    max_num_batch_seqs: int | None = None
    """How many of them may be of batches; None = half."""
    files_dir: Path | None = None
    """Where files and batches are kept; None = there are none."""
    max_file_size: int = 200 * 2**20
    files_quota: int = 10 * 2**30
    upload_deadline: float = 3600.0
    """An uploaded file must be complete after this long."""
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Passed to every chat template; a request's `chat_template_kwargs` wins."""
    tool_call_parser: str = "auto"
    """A name from `tools_choose`; so is `reasoning_parser`."""
    reasoning_parser: str = "auto"
    model_type: str = ""
    """The checkpoint's family, for a choice of parsers that the chat template leaves open."""
    accept_any_model: bool = False
    """Serve a request whatever model it names, instead of answering 404."""
    max_request_body: int = 32 * 1024 * 1024
    body_timeout: float = 30.0
    """A body that brings no byte for this long is answered with 408."""
    body_deadline: float = 300.0
    """A body must be complete after this long, however steadily it trickles."""
    template_timeout: float = 10.0
    max_logprobs: int = 20
    max_choices: int = 128
    max_prompts: int = 1024
    max_stops: int = 16
    max_stop_length: int = 4096
    """Characters of one stop string."""
    send_timeout: float = 60.0
    """A stream whose client takes nothing for this long is aborted."""
    ping_interval: float = 0.0
    """Seconds between comment lines in a silent stream; 0 = none: some benchmarks break on them."""
    metrics_prefix: str = "moestro:"
    log_requests: bool = False
    """Log every request, and the bodies of those that have one."""
    docs: bool = True
    """Serve /docs and /openapi.json."""
    cors_origins: tuple[str, ...] = ()

    @property
    def batch_seqs(self) -> int:
        """Most sequences of batches at the same time."""
        return self.max_num_batch_seqs or max(1, self.max_num_seqs // 2)

    def __post_init__(self) -> None:
        if not self.served_model_names:
            raise ValueError("served_model_names needs at least one name")


def serve_options() -> dict[str, Any]:
    """Options for `uvicorn.Config`.

    Keep-alive outlasts the usual 60 s of load balancers, so that they close first; the backlog
    takes a benchmark that opens all its connections at once. Signals and draining are the command
    line's business, so what uvicorn itself waits for at the end is short.
    """
    from moestro.server.http_protocol import HeadLimits

    return {
        "loop": "uvloop",
        "http": HeadLimits,
        "lifespan": "on",
        "ws": "none",
        "timeout_keep_alive": 75,
        "timeout_graceful_shutdown": 5,
        "backlog": 2048,
        "access_log": False,
        "server_header": False,
        "date_header": True,
        "log_config": None,
    }
