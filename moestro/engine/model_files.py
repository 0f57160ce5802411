"""A checkpoint's files as an engine uses them, and in which form the routed experts are held:
plain, packed as the checkpoint has them, or quantised while loading.

Owns: that choice, what it means for blobs and for the store that reads them, and how it is told to
people. Does not own: formats (`kernels.formats`) or how a checkpoint spells them
(`engine.quantized`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from moestro.config import Config
from moestro.engine.checkpoint import Checkpoint
from moestro.engine.expert_files import expert_sources, experts_packed
from moestro.engine.models.spec import ModelSpec
from moestro.engine.quantized import PackedTensors
from moestro.engine.weights import packed_bytes
from moestro.errors import ConfigError, ModelError
from moestro.expert_cache.layout import ExpertLayout, gated_layout, packed_layout
from moestro.expert_cache.quantizing import QuantizingStore
from moestro.expert_cache.store import DummyStore, ExpertStore, SafetensorsStore
from moestro.kernels.formats import LOSSY, Format


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The weights of `spec`. `checkpoint` is None when they are made up."""

    spec: ModelSpec
    checkpoint: Checkpoint | None
    packed: PackedTensors | None  # the quantised matrices of a quantised checkpoint
    format: Format | None  # of the experts in memory; None: plain
    lossy: bool  # they are quantised while loading

    def notes(self) -> tuple[str, ...]:
        """What the start-up report and `moestro check` say of the experts' format."""
        if self.format is None:
            return ()
        if self.lossy:
            return (
                f"experts are quantised to {self.format.name} while loading, which is lossy: "
                "docs/formats.md has by how much",
            )
        return (f"experts stay in {self.format.name}, as the checkpoint has them",)

    def dense_bytes(self, dtype: str) -> int | None:
        """Bytes of the dense weights of a quantised checkpoint; None when they are plain."""
        if self.checkpoint is None or self.packed is None:
            return None
        return packed_bytes(self.checkpoint, self.spec, self.packed, getattr(torch, dtype))

    def layout(self, dtype: str) -> ExpertLayout:
        """The blob of one expert; `dtype` is what is computed in."""
        hidden, width, bias = self.spec.hidden, self.spec.moe.intermediate, self.spec.moe.bias
        if self.format is None:
            return gated_layout(hidden, width, dtype, bias=bias)
        return packed_layout(hidden, width, dtype, self.format, bias=bias)

    def store(self, layout: ExpertLayout, seed: int, *, direct: bool) -> ExpertStore:
        """Where experts are read from. ModelError names what is missing or misshapen."""
        if self.checkpoint is None:
            return DummyStore(layout, seed)
        if self.lossy:
            sizes = layout.hidden, layout.intermediate
            plain = gated_layout(*sizes, "float32", bias=layout.has_bias)
            sources = expert_sources(self.checkpoint, self.spec)
            return QuantizingStore(SafetensorsStore(plain, sources, direct=direct), layout)
        packed = self.packed if self.format is not None else None
        sources = expert_sources(self.checkpoint, self.spec, packed)
        return SafetensorsStore(layout, sources, direct=direct)


def open_files(config: Config, spec: ModelSpec, path: Path) -> ModelFiles:
    """Read the headers of the files in `path` and settle the experts' format. ModelError when they
    are damaged or in an order that is not served, ConfigError when --expert-dtype cannot be."""
    if config.load_format == "dummy":
        form = spec.quantization.format if spec.quantization is not None else None
        return _settle(config, ModelFiles(spec, None, None, form, False))
    checkpoint = Checkpoint(path)
    packed = None
    if spec.quantization is not None:
        packed = PackedTensors(checkpoint, spec.quantization)
        packed.check_order()
    form = packed.format if packed is not None and experts_packed(spec, packed) else None
    return _settle(config, ModelFiles(spec, checkpoint, packed, form, False))


def _settle(config: Config, files: ModelFiles) -> ModelFiles:
    wanted, spec = config.expert_dtype, files.spec
    if wanted != "auto" and files.format is not None:
        raise ConfigError(
            f"--expert-dtype is {wanted}, but the experts of this checkpoint are quantised already "
            f"({files.format.name})",
            param="expert_dtype",
        )
    form = files.format if wanted == "auto" else LOSSY[wanted]
    for n, k in ((spec.moe.intermediate, spec.hidden), (spec.hidden, spec.moe.intermediate)):
        if form is not None and (lacking := form.lacks(n, k)):
            problem = f"experts of [{n}, {k}] cannot be {form.name}: {lacking}"
            if wanted == "auto":
                raise ModelError(problem)
            raise ConfigError(f"--expert-dtype is {wanted}, but {problem}", param="expert_dtype")
    return ModelFiles(spec, files.checkpoint, files.packed, form, wanted != "auto")
