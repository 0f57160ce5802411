"""The tensors of quantised matrices in a checkpoint.

Owns: for each way of quantising, how its tensors are named, shaped and typed, and into which field
of our own form (`kernels.formats`) each goes. Does not own: reading config.json
(`engine.models.quantization`) or reordering bytes (`expert_cache.repack`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from moestro.engine.checkpoint import Checkpoint, TensorRef
from moestro.engine.models.quantization import Quantization, Scheme
from moestro.errors import ModelError
from moestro.kernels.formats import Format

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a quantised module."""

    suffix: str  # of its name, behind the module's
    field: str
    dtypes: tuple[str, ...]  # any of these, as `TensorRef.dtype` has them
    shape: Callable[[Format, int, int], Shape]  # for a matrix [n, k]
    repack: str = ""  # see `repack.REPACK`


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor and the field of a packed matrix that it fills."""

    field: str
    ref: TensorRef
    repack: str


def _grid(form: Format, n: int, k: int) -> Shape:
    return form.grid(n, k)


def _grid_turned(form: Format, n: int, k: int) -> Shape:
    return form.grid(n, k)[::-1]


def _one(form: Format, n: int, k: int) -> Shape:
    return (1,)


_HALVES = ("bfloat16", "float16", "float32")
_NVFP4 = (
    Stored(".weight_packed", "codes", ("U8",), lambda form, n, k: (n, k // 2)),
    Stored(".weight_scale", "scales", ("F8_E4M3",), _grid),
    Stored(".weight_global_scale", "factor", ("float32",), _one, "inverse"),
)
_CT_INT4 = (
    Stored(".weight_packed", "codes", ("I32",), lambda form, n, k: (n, k // 8)),
    Stored(".weight_scale", "scales", _HALVES, _grid),
    Stored(
        ".weight_zero_point", "zeros", ("I32",),
        lambda form, n, k: (n // 8, form.grid(n, k)[1]), "zeros in rows",
    ),
)  # fmt: skip


def _gptq(zeros: str) -> tuple[Stored, ...]:
    return (
        Stored(".qweight", "codes", ("I32",), lambda form, n, k: (k // 8, n), "columns of 32 bits"),
        Stored(".scales", "scales", _HALVES[:2], _grid_turned, "columns of 16 bits"),
        Stored(".qzeros", "zeros", ("I32",), _turned_zeros, zeros),
    )


def _turned_zeros(form: Format, n: int, k: int) -> Shape:
    return form.grid(n, k)[1], n // 8


def _fp8(suffix: str, *dtypes: str) -> tuple[Stored, ...]:
    return (
        Stored(".weight", "codes", ("F8_E4M3",), lambda form, n, k: (n, k)),
        Stored(suffix, "scales", dtypes, _grid),
    )


# Of MXFP4 the matrices of all experts are one tensor, in blocks of 16 bytes.
SCHEMES: dict[Scheme, tuple[Stored, ...]] = {
    Scheme.FP8: _fp8(".weight_scale_inv", "float32", "bfloat16", "F8_E8M0"),
    Scheme.CT_FP8: _fp8(".weight_scale", *_HALVES),
    Scheme.CT_INT4: _CT_INT4,
    Scheme.CT_NVFP4: _NVFP4,
    Scheme.GPTQ: _gptq("zeros in columns, less 1"),
    Scheme.GPTQ_V2: _gptq("zeros in columns"),
    Scheme.AWQ: (
        Stored(".qweight", "codes", ("I32",), lambda form, n, k: (k, n // 8), "awq"),
        Stored(".scales", "scales", _HALVES[:2], _grid_turned, "columns of 16 bits"),
        Stored(".qzeros", "zeros", ("I32",), _turned_zeros, "awq zeros"),
    ),
    Scheme.MODELOPT_NVFP4: (
        Stored(".weight", "codes", ("U8",), lambda form, n, k: (n, k // 2)),
        _NVFP4[1],
        Stored(".weight_scale_2", "factor", ("float32",), _one),
    ),
    Scheme.MXFP4: (
        Stored("_blocks", "codes", ("U8",), lambda form, n, k: (n, k // 32, 16)),
        Stored("_scales", "scales", ("U8", "F8_E8M0"), _grid),
    ),
}
# Tensors of a quantised module that say nothing new: how activations were, shapes, and what is
# checked when the model is loaded.
_UNUSED = (
    *(".input_scale", ".input_global_scale", ".weight_shape"),
    *(".k_scale", ".v_scale", ".q_scale", ".g_idx", ".qzeros"),
)
_FIELD_DTYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E8M0": "float8_e8m0fnu"}


class PackedTensors:
    """The quantised matrices of one checkpoint. Names are those of plain weights: `x.weight`."""

    def __init__(self, checkpoint: Checkpoint, quantization: Quantization) -> None:
        self._checkpoint = checkpoint
        self._quantization = quantization
        self._stored = SCHEMES[quantization.scheme]
        self.format = self._settle(quantization.format)

    def has(self, name: str) -> bool:
        """Whether any tensor of a quantised matrix of that name is there."""
        tensors = self._checkpoint.tensors
        for stored in self._stored:
            ref = tensors.get(_named(name, stored))
            # Codes may have the plain weight's own name, and are told apart by their dtype.
            if ref is not None and (ref.name != name or ref.dtype in stored.dtypes):
                return True
        return False

    def pieces(self, name: str, n: int, k: int, *, experts: int = 0) -> tuple[Piece, ...]:
        """The tensors of a matrix [n, k]; with `experts`, of so many that are one tensor.

        ModelError names one that is missing, or has another shape or dtype.
        """
        module = name.removesuffix(".weight")
        if self._quantization.ignores(module):
            raise ModelError(f"{module} is quantised, though quantization_config leaves it out")
        if lacking := self._lacks(n, k):
            raise ModelError(f"{module} [{n}, {k}] cannot be read as {self.format.name}: {lacking}")
        fields = {field.name for field in self.format.fields(n, k)}
        prefix = (experts,) if experts else ()
        return tuple(
            Piece(
                stored.field,
                self._need(name, stored, (*prefix, *stored.shape(self.format, n, k))),
                stored.repack,
            )
            for stored in self._stored
            if stored.field in fields
        )

    def names(self, name: str) -> set[str]:
        """Every name that a tensor of this matrix may have."""
        module = name.removesuffix(".weight")
        suffixes = {stored.suffix for stored in self._stored} | set(_UNUSED)
        return {module + suffix for suffix in suffixes}

    def check_order(self) -> None:
        """ModelError unless GPTQ's columns are in order and its unused zero points are the middle.

        Reads the data of these small tensors: all dense ones, and those of each layer's first
        expert.
        """
        if self._quantization.scheme not in (Scheme.GPTQ, Scheme.GPTQ_V2):
            return
        middle = 0x77 if self._quantization.scheme is Scheme.GPTQ else 0x88
        for name, ref in self._checkpoint.tensors.items():
            expert = re.search(r"experts\.(\d+)\.", name)
            if expert is not None and expert[1] != "0":
                continue
            if name.endswith(".g_idx"):
                found = _load(ref, np.int32)
                expected = np.arange(len(found)) // (self.format.columns or len(found))
                if not (found == expected).all():
                    raise ModelError(f"{name} is not in order (act-order), which is not served")
            elif (
                name.endswith(".qzeros")
                and not self.format.zeros
                and not (_load(ref, np.uint8) == middle).all()
            ):
                raise ModelError(f"{name} has zero points, though quantization_config.sym is true")

    def _settle(self, form: Format) -> Format:
        """`form` with the scales' dtype that the checkpoint has."""
        stored = next(stored for stored in self._stored if stored.field == "scales")
        for name, ref in self._checkpoint.tensors.items():
            if name.endswith(stored.suffix) and ref.dtype in stored.dtypes and ref.dtype != "U8":
                return replace(form, scale=_FIELD_DTYPES.get(ref.dtype, ref.dtype))
        return form

    def _lacks(self, n: int, k: int) -> str | None:
        words = any("I32" in stored.dtypes for stored in self._stored)
        if words and (k % 8 or n % 8):
            return "both must be multiples of 8"
        if self.format.bits == 4 and self.format.columns and k % self.format.columns:
            return f"{k} columns are not whole groups of {self.format.columns}"
        return self.format.lacks(n, k)

    def _need(self, name: str, stored: Stored, shape: Shape) -> TensorRef:
        wanted = _named(name, stored)
        ref = self._checkpoint.tensors.get(wanted)
        if ref is None:
            raise ModelError(f"tensor {wanted} is missing")
        if ref.shape != shape and not prod(ref.shape) == prod(shape) == 1:
            raise ModelError(f"tensor {wanted} has shape {list(ref.shape)}, expected {list(shape)}")
        kept = _FIELD_DTYPES.get(ref.dtype, ref.dtype)
        of_others = stored.field == "scales" and ref.dtype != "U8" and kept != self.format.scale
        if ref.dtype not in stored.dtypes or of_others:
            expected = self.format.scale if of_others else " or ".join(stored.dtypes)
            raise ModelError(f"tensor {wanted} has dtype {ref.dtype}, expected {expected}")
        return ref


def _named(name: str, stored: Stored) -> str:
    return name.removesuffix(".weight") + stored.suffix


def _load(ref: TensorRef, dtype: type[np.generic]) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
    with open(ref.path, "rb") as file:
        file.seek(ref.offset)
        return np.frombuffer(file.read(ref.nbytes), dtype)
