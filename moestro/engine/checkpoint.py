"""Where every tensor of a safetensors checkpoint lies.

Owns: the headers and the shard index, checked against the files. Does not own: what the tensors
mean (`weights` does). Format: 8 bytes of header length, a JSON header, then the data.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moestro.engine.models.hf_config import read_json
from moestro.errors import ModelError

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100 << 20  # bytes, as in the format's own definition


@dataclass(frozen=True, slots=True)
class TensorRef:
    """One tensor in a file. `offset` and `nbytes` are absolute."""

    name: str
    path: str
    offset: int
    nbytes: int
    dtype: str  # as torch names it, or the file's own name when we cannot compute in it
    shape: tuple[int, ...]


class Checkpoint:
    """All tensors of one folder by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tensors: dict[str, TensorRef] = {}
        for path in _shards(folder):
            for ref in read_header(path):
                if ref.name in self.tensors:
                    raise ModelError(f"tensor {ref.name} is in two files of {folder.name}")
                self.tensors[ref.name] = ref
        self._check_index()

    def _check_index(self) -> None:
        index = self.folder / _INDEX
        if not index.exists():
            return
        promised = read_json(index).get("weight_map", {})
        missing = sorted(set(promised) - set(self.tensors))
        if missing:
            raise ModelError(
                f"{_INDEX} names {missing[0]} in {promised[missing[0]]}, not found there"
            )

    def find(self, names: Iterable[str]) -> TensorRef | None:
        """The first of `names` that exists."""
        return next((self.tensors[name] for name in names if name in self.tensors), None)

    def need(self, name: str, shape: tuple[int, ...]) -> TensorRef:
        """The tensor `name`; ModelError when missing, of another shape or of a dtype not served."""
        ref = self.tensors.get(name)
        if ref is None:
            raise ModelError(f"tensor {name} is missing")
        return check_ref(ref, shape)


def check_ref(ref: TensorRef, shape: tuple[int, ...]) -> TensorRef:
    """`ref` itself, when it has this shape and a dtype we compute in."""
    if ref.shape != shape:
        raise ModelError(f"tensor {ref.name} has shape {list(ref.shape)}, expected {list(shape)}")
    if ref.dtype not in DTYPES.values():
        raise ModelError(f"tensor {ref.name} has dtype {ref.dtype}, which is not served")
    return ref


def read_header(path: Path) -> list[TensorRef]:
    """The tensors of one safetensors file; ModelError when it is damaged or cut."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
            raise ModelError(f"{path.name} is not a safetensors file")
        try:
            header: dict[str, Any] = json.loads(file.read(length))
        except ValueError:
            raise ModelError(f"{path.name} has a damaged header") from None
    base = 8 + length
    header.pop("__metadata__", None)
    return [_ref(path, name, entry, base, size) for name, entry in header.items()]


def _ref(path: Path, name: str, entry: dict[str, Any], base: int, size: int) -> TensorRef:
    lo, hi = entry["data_offsets"]
    if base + hi > size:
        raise ModelError(f"{path.name} is cut: {name} ends at byte {base + hi}, the file at {size}")
    dtype = DTYPES.get(entry["dtype"], entry["dtype"])
    return TensorRef(name, str(path), base + lo, hi - lo, dtype, tuple(entry["shape"]))


def _shards(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.exists():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(f"{_INDEX} names {missing[0]}, which is not in {folder}")
        return [folder / name for name in names]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"no safetensors file in {folder}; other formats are not read")
    return found
