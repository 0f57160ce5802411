"""Every setting there is, in one frozen definition, and how its sources are merged.

Owns: names, types, defaults and meaning of all settings; reading them from the environment and
from a file; the order of precedence. Does not own: the command line (`server.cli_flags` builds
it from the fields here), nor sizes that are computed later (the memory plan holds those).
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moestro.config_values import (
    ENV_PREFIX,
    AutoCount,
    AutoSize,
    JsonObject,
    Name,
    Names,
    Origins,
    Size,
    shortened,
    spelled,
)
from moestro.errors import ConfigError

PRESETS = Path(__file__).parent / "configs"

MULTIPLE = frozenset({"served_model_name", "api_key", "cors_origins"})  # fields with several values
SECRET = frozenset({"api_key", "ssl_keyfile_password"})  # fields whose values are never shown


class Config(BaseModel):
    """All settings of one server and its engine. Never changed after it was built."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        "",
        description="Checkpoint: a directory or a hub id. Empty: the included demo model.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit of the hub repository. Default: its main branch."
    )
    served_model_name: Names = Field(
        (), description="Names that clients use for the model. Default: the model as given."
    )
    accept_any_model: bool = Field(
        False, description="Serve a request whatever model it names, instead of answering 404."
    )
    chat_template: Path | None = Field(
        None, description="File with a chat template (Jinja) to use instead of the checkpoint's."
    )
    chat_template_kwargs: JsonObject = Field(
        None,
        description="Variables for every chat template, as a JSON object; a request's own win.",
    )
    tool_call_parser: Literal[
        "auto", "none", "hermes", "qwen3_coder", "mistral", "deepseek", "harmony"
    ] = Field(
        "auto",
        description="How the model writes tool calls. `auto`: what the chat template shows; "
        "`none`: requests with tools are refused.",
    )
    reasoning_parser: Literal["auto", "none", "think", "mistral", "harmony"] = Field(
        "auto",
        description="How reasoning is told apart, as `reasoning_content`. `auto`: what the chat "
        "template shows; `none`: it stays in the content.",
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="`auto` reads the checkpoint; `dummy` uses random weights of its shape."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Where the model runs. `auto`: a CUDA device where torch finds one and Triton "
        "is installed, else the CPU.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and activations. `auto`: float32, on a GPU the checkpoint's."
    )
    expert_dtype: Literal["auto", "fp8", "int4", "mxfp4"] = Field(
        "auto",
        description="Format of the experts in memory and on the link. `auto`: the checkpoint's; "
        "else plain experts are quantised while loading: less exact (docs/formats.md).",
    )
    threads: AutoCount = Field(
        None, description="CPU threads of the engine. Default: cores - 1, at least 1."
    )
    gpu_memory: AutoSize = Field(
        None,
        description="Device memory for everything: weights, expert slots, KV cache, workspace. "
        "Default: what the model uses, at most 97 % of what is free. Without a GPU it is ordinary "
        "memory, by default at most half of what is free.",
    )
    host_memory: AutoSize = Field(
        None,
        description="Host memory for experts outside the slots. Default: what the model uses, "
        "at most half of what is free.",
    )
    expert_slots: AutoCount = Field(
        None,
        description="Experts held in device memory, those in passing included. At least 2; on a "
        "GPU what one layer of a step may need. Default: what --gpu-memory leaves room for.",
    )
    kv_cache_tokens: AutoCount = Field(
        None,
        description="Tokens that the KV cache holds. Default: 512 for each sequence or twice the "
        "longest, at most half of what --gpu-memory leaves beside the dense weights.",
    )
    block_size: int = Field(16, gt=0, le=1024, description="Tokens in one block of the KV cache.")
    enable_prefix_caching: bool = Field(
        True, description="Reuse the KV cache of prompts that start alike."
    )
    max_model_len: AutoCount = Field(
        None,
        description="Most tokens of one sequence, prompt included. Default: the model's own.",
    )
    max_num_seqs: int = Field(64, gt=0, description="Most sequences that run at the same time.")
    max_num_queued: int = Field(
        1024, gt=0, description="Most sequences that wait; one more is answered 503."
    )
    max_num_batch_seqs: AutoCount = Field(
        None,
        description="Most sequences of batches (/v1/batches) among those that run. "
        "Default: half of --max-num-seqs.",
    )
    max_sweep_tokens: int = Field(
        8192, gt=0, description="Most prompt tokens that travel up the layers together."
    )
    expert_policy: Literal[
        "predictive", "lru_frequency", "lru", "lfu", "score", "activation_aware"
    ] = Field("lru_frequency", description="Which experts stay in the slots (docs/policies.md).")
    cpu_experts: Literal["auto", "on", "off"] = Field(
        "auto",
        description="On a GPU: whether the CPU computes a share of the experts that are not on the "
        "device. `auto`: where it can and as far as it pays; `on`: an error where it cannot.",
    )
    cpu_expert_threads: AutoCount = Field(
        None, description="CPU threads for that. Default: cores - 2, at least 1."
    )
    expert_policy_state: Path | None = Field(
        None,
        description="File for what predictive or activation_aware learnt. Default: none for "
        "predictive; for activation_aware one for each model, in the user's cache directory.",
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of the random weights of `--load-format dummy`."
    )
    trace: Path | None = Field(
        None, description="File to record expert routing to, for `moestro simulate`."
    )
    host: Name = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on. 0: any free one.")
    api_key: Names = Field(
        (), repr=False, description="Keys that clients must send, any one of them. Default: none."
    )
    api_key_file: Path | None = Field(
        None,
        description="File with more keys: one a line, `key` or `name:key`. Read again on SIGHUP.",
    )
    allow_unauthenticated: bool = Field(
        False, description="Allow listening beyond this machine without an API key."
    )
    rate_limit: AutoCount = Field(
        None,
        description="Requests a minute for each key, or each client address when there are no "
        "keys; one more is answered 429. Default: no limit.",
    )
    ssl_certfile: Path | None = Field(
        None, description="File with the TLS certificate (PEM). Default: plain HTTP."
    )
    ssl_keyfile: Path | None = Field(
        None, description="File with its private key. Default: it is in --ssl-certfile."
    )
    ssl_keyfile_password: str | None = Field(
        None, repr=False, description="Password of the private key, when it is encrypted."
    )
    cors_origins: Origins = Field(
        (), description="Origins whose web pages may use the API; `*` for all. Default: none."
    )
    docs: bool = Field(True, description="Serve /docs and /openapi.json.")
    max_request_body: Size = Field(32 * 2**20, description="Most bytes of one request body.")
    files_dir: Path | None = Field(
        None,
        description="Folder for /v1/files and /v1/batches, which are off without it. It keeps what "
        "users upload and what the model answers, for each API key apart.",
    )
    max_file_size: Size = Field(200 * 2**20, description="Most bytes of one uploaded file.")
    files_quota: Size = Field(
        10 * 2**30,
        description="Most bytes of all files together; an upload over it is refused. Results of "
        "batches count, but are not refused.",
    )
    request_timeout: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a generating request may take, waiting included, before it is "
        "ended with 504, or with an error event in a stream. Not for batches. 0: no limit.",
    )
    send_timeout: float = Field(
        60.0,
        gt=0,
        allow_inf_nan=False,
        description="A stream whose client takes nothing for so many seconds is ended.",
    )
    sse_keep_alive_interval: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds between comment lines in a stream, for proxies that cut silent ones. "
        "0: none.",
    )
    shutdown_timeout: float = Field(
        30.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that live requests have to finish once a stop was asked for.",
    )
    engine_restarts: int = Field(
        3,
        ge=0,
        description="Most restarts of an engine process that died, within ten minutes. Live "
        "requests go on in the new one; at one more death the server ends.",
    )
    engine_stall_timeout: float = Field(
        120.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without a sign of life after which an engine with live requests is "
        "killed and restarted.",
    )
    engine_load_timeout: float = Field(
        600.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without progress after which an engine that loads is killed and "
        "started again, as often as --engine-restarts allows.",
    )
    metrics_prefix: str = Field(
        "moestro:",
        pattern=r"^([a-zA-Z_:][a-zA-Z0-9_:]*)?$",
        description="What the names of all metrics start with.",
    )
    otlp_endpoint: Name | None = Field(
        None,
        description="Address of an OpenTelemetry collector (OTLP over HTTP) that gets a trace of "
        "each request, without any text. Needs `pip install moestro[otel]`. Default: no traces.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe message that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="`text` for people, `json` for machines: one object a line."
    )
    log_requests: bool = Field(
        False, description="Log every request with its body, which holds the prompt."
    )
    config: Path | None = Field(
        None,
        description="File with settings (YAML, TOML or JSON), or the name of an included preset.",
    )

    def to_json(self) -> str:
        """The settings as JSON for the engine process, without the API keys: it needs none."""
        return self.model_dump_json(exclude=set(SECRET))

    @classmethod
    def from_json(cls, text: str | bytes) -> Config:
        """The inverse of `to_json`."""
        return cls.model_validate_json(text)


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean X?)` for the known name closest to `name`, or nothing when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {close[0]}?)" if close else ""


def load(flags: Mapping[str, object], environ: Mapping[str, str] = os.environ) -> Config:
    """Merge the sources: `flags` (field -> value) over `environ` over the file over defaults.

    Raises ConfigError, which names the setting, where it came from and what would be right.
    """
    env = _from_environment(environ)
    file = flags.get("config", env.get("config"))
    layers: list[tuple[str, Mapping[str, object]]] = [("environment", env), ("command line", flags)]
    if file is not None:
        layers.insert(0, (str(file), _from_file(_find_file(str(file)))))
    values: dict[str, object] = {}
    source: dict[str, str] = {}
    for name, layer in layers:
        values.update(layer)
        source.update(dict.fromkeys(layer, name))
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _explain(error, source) from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    # An empty variable counts as unset: that is how compose files pass on what is not there.
    known = {ENV_PREFIX + name.upper(): name for name in Config.model_fields}
    values: dict[str, object] = {}
    for variable, text in environ.items():
        if not variable.startswith(ENV_PREFIX) or not text:
            continue
        if variable not in known:
            raise ConfigError(
                f"unknown environment variable {variable}{nearest(variable, known)}"
                f"{_service_link_hint(variable, text)}",
                param=variable,
            )
        name = known[variable]
        if name == "port" and "://" in text:
            raise ConfigError(
                f"{variable} is not a port{_service_link_hint(variable, text)}", param=variable
            )
        values[name] = re.split(r"[,\s]+", text.strip(", ")) if name in MULTIPLE else text
    return values


def _service_link_hint(variable: str, text: str) -> str:
    # Kubernetes adds such variables to every pod for a Service that is called "moestro".
    if "://" in text or "_SERVICE_" in variable or "_PORT_" in variable:
        return "; if Kubernetes set it, set enableServiceLinks: false in the pod"
    return ""


def _find_file(name: str) -> Path:
    path = Path(name)
    if path.is_file():
        return path
    presets = {p.stem: p for p in sorted(PRESETS.glob("*.toml"))}
    if name in presets:
        return presets[name]
    raise ConfigError(
        f"no config file {name}, and no preset of that name{nearest(name, presets)}; "
        f"presets: {', '.join(presets) or 'none'}",
        param="config",
    )


def _from_file(path: Path) -> dict[str, object]:
    try:
        data = _parse_file(path)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read config file {path}: {error}", param="config") from None
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"config file {path} must hold names and values", param="config")
    values: dict[str, object] = {}
    known = set(Config.model_fields) - {"config"}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(
                f"unknown key {key} in config file {path}{nearest(name, known)}", param=str(key)
            )
        if name in values:
            raise ConfigError(f"key {key} is twice in config file {path}", param=name)
        values[name] = value
    return values


def _parse_file(path: Path) -> object:
    text = path.read_text(encoding="utf-8")
    match path.suffix.lower():
        case ".toml":
            return tomllib.loads(text)
        case ".json":
            return json.loads(text)
        case ".yaml" | ".yml":
            return yaml.safe_load(text)
        case other:
            raise ValueError(f"its name must end in .yaml, .yml, .toml or .json, not {other!r}")


def _explain(error: ValidationError, source: Mapping[str, str]) -> ConfigError:
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return ConfigError(
            f"unknown setting {name}{nearest(name, Config.model_fields)}", param=name
        )
    shown = "" if name in SECRET else f" {shortened(first['input'])}"
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return ConfigError(f"{spelled(name, source)}{shown}: should be {message}", param=name)
