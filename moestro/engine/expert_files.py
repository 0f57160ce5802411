"""Where every routed expert's bytes lie in the checkpoint's files.

Owns: the byte ranges of one expert for each way in which checkpoints store them. Nothing is read:
the expert cache reads from these files itself. Dense tensors are `engine.weights`'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moestro.engine.checkpoint import Checkpoint, TensorRef
from moestro.engine.models.names import (
    EachExpert,
    ExpertNames,
    InterleavedExperts,
    PackedExperts,
    StackedExperts,
)
from moestro.engine.models.spec import ModelSpec
from moestro.engine.quantized import PackedTensors
from moestro.errors import ModelError
from moestro.expert_cache.layout import ExpertSource, Extent


def expert_sources(
    checkpoint: Checkpoint, spec: ModelSpec, packed: PackedTensors | None = None
) -> list[ExpertSource]:
    """Byte ranges of every expert, layer by layer; `ExpertSource.layer` counts MoE layers. With
    `packed` they fill a packed layout in its format.

    ModelError names a tensor that is missing or has a wrong shape.
    """

    def extents(layer: int, expert: int) -> tuple[Extent, ...]:
        if packed is not None:
            return _packed_extents(checkpoint, packed, spec, layer, expert)
        return _extents(checkpoint, spec, layer, expert)

    return [
        ExpertSource(ordinal, expert, extents(layer, expert))
        for ordinal, layer in enumerate(spec.moe_layers)
        for expert in range(spec.moe.experts)
    ]


def experts_packed(spec: ModelSpec, packed: PackedTensors | None) -> bool:
    """Whether the routed experts are among the quantised matrices of a checkpoint."""
    if packed is None:
        return False
    layer = spec.moe_layers[0]
    return any(
        packed.has(name.format(l=layer, e=expert))
        for names in spec.names.experts
        for name in _templates(names)
        for expert in range(spec.moe.experts)
    )


def expert_tensors(spec: ModelSpec, packed: PackedTensors | None = None) -> set[str]:
    """Every name that a tensor of experts may have."""
    plain = _plain_names(spec)
    return plain if packed is None else plain.union(*map(packed.names, plain))


def _plain_names(spec: ModelSpec) -> set[str]:
    return {
        name.format(l=layer, e=expert)
        for layer in spec.moe_layers
        for names in spec.names.experts
        for name in _templates(names)
        for expert in range(spec.moe.experts if isinstance(names, EachExpert) else 1)
    }


def _templates(names: ExpertNames) -> tuple[str, ...]:
    if isinstance(names, PackedExperts):
        return names.gate_up, names.down
    if isinstance(names, InterleavedExperts):
        return names.gate_up, names.down, *names.biases
    return names.gate, names.up, names.down


def _extents(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert: int
) -> tuple[Extent, ...]:
    width, hidden, count = spec.moe.intermediate, spec.hidden, spec.moe.experts

    def need(name: str, *shape: int) -> TensorRef:
        return checkpoint.need(name.format(l=layer, e=expert), shape)

    names = _stored(checkpoint, spec, layer, expert)
    match names:
        case EachExpert():
            return (
                _extent(need(names.gate, width, hidden), "gate_up", 0, width),
                _extent(need(names.up, width, hidden), "gate_up", width, width),
                _extent(need(names.down, hidden, width), "down", 0, hidden),
            )
        case PackedExperts():
            both = need(names.gate_up, count, 2 * width, hidden)
            down = need(names.down, count, hidden, width)
            return (
                _extent(both, "gate_up", 0, 2 * width, expert, count),
                _extent(down, "down", 0, hidden, expert, count),
            )
        case StackedExperts():
            gate, up, down = (
                need(name, count * width, hidden) for name in (names.gate, names.up, names.down)
            )
            return (
                _extent(gate, "gate_up", 0, width, expert, count),
                _extent(up, "gate_up", width, width, expert, count),
                _extent(down, "down", 0, hidden, expert, count, transposed=True),
            )
        case InterleavedExperts():
            both = need(names.gate_up, count, hidden, 2 * width)
            down = need(names.down, count, width, hidden)
            part = _extent(both, "gate_up", 0, 2 * width, expert, count, transposed=True)
            return (
                replace(part, repack="interleaved"),
                _extent(down, "down", 0, hidden, expert, count, transposed=True),
                *bias_extents(checkpoint, spec, names, layer, expert),
            )


def bias_extents(
    checkpoint: Checkpoint, spec: ModelSpec, names: InterleavedExperts, layer: int, expert: int
) -> tuple[Extent, Extent]:
    """Those of an expert's two products; they are plain whatever the matrices are."""
    width, hidden, count = spec.moe.intermediate, spec.hidden, spec.moe.experts
    up, down = (name.format(l=layer) for name in names.biases)
    first = checkpoint.need(up, (count, 2 * width))
    part = _extent(first, "gate_up_bias", 0, 2 * width, expert, count)
    second = checkpoint.need(down, (count, hidden))
    return (
        replace(part, repack="interleaved"),
        _extent(second, "down_bias", 0, hidden, expert, count),
    )


def _packed_extents(
    checkpoint: Checkpoint, packed: PackedTensors, spec: ModelSpec, layer: int, expert: int
) -> tuple[Extent, ...]:
    width, hidden = spec.moe.intermediate, spec.hidden
    for names in spec.names.experts:
        if isinstance(names, InterleavedExperts) and packed.has(names.gate_up.format(l=layer)):
            up, down = (name.format(l=layer) for name in (names.gate_up, names.down))
            count = spec.moe.experts
            return (
                *_one_of(packed, up, "gate_up", 2 * width, hidden, expert, count, "interleaved"),
                *_one_of(packed, down, "down", hidden, width, expert, count),
                *bias_extents(checkpoint, spec, names, layer, expert),
            )
        if isinstance(names, EachExpert):
            gate, up, down = (
                name.format(l=layer, e=expert) for name in (names.gate, names.up, names.down)
            )
            if any(packed.has(name) for name in (gate, up, down)):
                return (
                    *_packed_matrix(packed, gate, "gate_up", width, hidden, 0),
                    *_packed_matrix(packed, up, "gate_up", width, hidden, 1),
                    *_packed_matrix(packed, down, "down", hidden, width, 0),
                )
    tried = _templates(spec.names.experts[0])[0].format(l=layer, e=expert)
    raise ModelError(f"layer {layer} has no quantised expert {expert}: {tried}")


def _packed_matrix(
    packed: PackedTensors, name: str, part: str, n: int, k: int, place: int
) -> Iterator[Extent]:
    """The byte ranges of the matrix [n, k] called `name`, number `place` of a part's stack."""
    fields = {field.name: field for field in packed.format.fields(n, k)}
    for piece in packed.pieces(name, n, k):
        ref, field = piece.ref, fields[piece.field]
        rows = field.shape[0]
        yield Extent(
            ref.path,
            ref.offset,
            ref.nbytes,
            field.dtype,
            f"{part}.{field.name}",
            place * rows,
            rows,
            repack=piece.repack,
        )


def _one_of(
    packed: PackedTensors,
    name: str,
    part: str,
    n: int,
    k: int,
    expert: int,
    count: int,
    repack: str = "",
) -> Iterator[Extent]:
    """The same of a matrix that is number `expert` of `count` in its tensors."""
    fields = {field.name: field for field in packed.format.fields(n, k)}
    for piece in packed.pieces(name, n, k, experts=count):
        field, size = fields[piece.field], piece.ref.nbytes // count
        at = piece.ref.offset + expert * size
        target, rows = f"{part}.{field.name}", field.shape[0]
        yield Extent(piece.ref.path, at, size, field.dtype, target, 0, rows, repack=repack)


def _stored(checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert: int) -> ExpertNames:
    """The first way of storing of which the checkpoint has a tensor for this expert."""
    for names in spec.names.experts:
        if any(name.format(l=layer, e=expert) in checkpoint.tensors for name in _templates(names)):
            return names
    tried = _templates(spec.names.experts[0])[0].format(l=layer, e=expert)
    raise ModelError(f"layer {layer} has no expert {expert}: {tried} is missing")


def _extent(
    ref: TensorRef,
    part: str,
    row: int,
    rows: int,
    index: int = 0,
    count: int = 1,
    *,
    transposed: bool = False,
) -> Extent:
    """Part number `index` of `count` equal parts of a tensor."""
    size = ref.nbytes // count
    at = ref.offset + index * size
    return Extent(ref.path, at, size, ref.dtype, part, row, rows, transposed)
