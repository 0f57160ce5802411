"""Fixtures that several folders share: tiny checkpoints and transformers' answers to them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# Before torch is imported anywhere: tests run beside each other, and tiny models need one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any import


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function: the folder of the tiny checkpoint with this name in `oracle.specs.SPECS`."""
    from tests.oracle import specs, tiny

    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("checkpoint") / name
            made[name] = tiny.make(folder, specs.SPECS[name])
        return made[name]

    return get


@pytest.fixture(scope="session")
def golden(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]
) -> Callable[[str], object]:
    """A function: transformers' answers for the checkpoint with this name, kept between runs."""
    from tests.oracle import golden as oracle

    cache = getattr(request.config, "cache", None)  # absent with -p no:cacheprovider
    folder = Path(str(cache.mkdir("golden"))) if cache is not None else None
    known: dict[str, oracle.Golden] = {}

    def get(name: str) -> oracle.Golden:
        if name not in known:
            known[name] = oracle.golden(checkpoint(name), folder)
        return known[name]

    return get
