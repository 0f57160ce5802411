"""From what the user called the model to a directory with a checkpoint.

Owns: the demo, local directories, the hub download and its errors. Does not own what a
checkpoint contains (`engine.checkpoint` and the tokenizer judge that).
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path

from moestro.config import Config
from moestro.errors import ConfigError, ModelError

log = logging.getLogger(__name__)

DEMO_NAME = "moestro-demo"
_HUB_ID = re.compile(r"[A-Za-z0-9_-][\w.-]*(/[A-Za-z0-9_-][\w.-]*)?")
_TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint on this machine and the names that clients may use for it."""

    path: Path
    names: tuple[str, ...]


def resolve(config: Config) -> Model:
    """Find, or download, what `config.model` names. Raises ModelError or ConfigError."""
    path, name = _locate(config)
    _require_checkpoint(path, config)
    return Model(path, config.served_model_name or (name,))


def _locate(config: Config) -> tuple[Path, str]:
    if not config.model:
        _refuse_revision(config, "the demo")
        from moestro.demo import demo_path

        return demo_path(), DEMO_NAME
    path = Path(config.model).expanduser()
    if path.exists():
        _refuse_revision(config, f"the directory {path}")
        return path.resolve(), config.model
    if not _HUB_ID.fullmatch(config.model):
        raise ModelError(f"no directory {config.model}, and that is no hub id", param="model")
    return _download(config), config.model


def _refuse_revision(config: Config, what: str) -> None:
    if config.revision is not None:
        raise ConfigError(f"a revision belongs to a hub model, not to {what}", param="revision")


def _download(config: Config) -> Path:
    from huggingface_hub import snapshot_download

    weights = () if config.load_format == "dummy" else ("*.safetensors",)
    try:
        # Only the top folder: subfolders hold other formats of the same weights.
        path = snapshot_download(
            config.model,
            revision=config.revision,
            allow_patterns=[*_TEXT_FILES, *weights],
            ignore_patterns=["*/*", "consolidated*"],
        )
    except Exception as error:  # the hub client raises its own, its HTTP client's and OSError
        log.debug("hub download failed", exc_info=True)
        raise ModelError(
            f"cannot get model {config.model}: there is no directory of that name here, and the "
            f"hub {_offline()}answered: {_first_line(error)}",
            param="model",
        ) from error
    return Path(path)


def _offline() -> str:
    on = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    return "(HF_HUB_OFFLINE is set, so only its local cache) " if on else ""


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _require_checkpoint(path: Path, config: Config) -> None:
    if not path.is_dir():
        raise ModelError(f"{path} is a file; name the checkpoint's directory", param="model")
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} has no config.json, so it is no checkpoint", param="model")
    if config.load_format == "dummy" or any(path.glob("*.safetensors")):
        return
    pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
    if pickles:
        raise ModelError(
            f"{path} has weights only as {pickles[0]}, a format that can run code when it is "
            "read; convert them to safetensors",
            param="model",
        )
    raise ModelError(f"{path} has no safetensors files", param="model")
