"""Where every routed expert's bytes lie in the checkpoint's files.

Owns: the byte ranges of one expert for each way in which checkpoints store them. Nothing is read:
the expert cache reads from these files itself. Dense tensors are `engine.weights`'.
"""

from __future__ import annotations

from moestro.engine.checkpoint import Checkpoint, TensorRef
from moestro.engine.models.names import EachExpert, ExpertNames, PackedExperts, StackedExperts
from moestro.engine.models.spec import ModelSpec
from moestro.errors import ModelError
from moestro.expert_cache.layout import ExpertSource, Extent


def expert_sources(checkpoint: Checkpoint, spec: ModelSpec) -> list[ExpertSource]:
    """Byte ranges of every expert, layer by layer; `ExpertSource.layer` counts MoE layers.

    ModelError names a tensor that is missing or has a wrong shape.
    """
    return [
        ExpertSource(ordinal, expert, _extents(checkpoint, spec, layer, expert))
        for ordinal, layer in enumerate(spec.moe_layers)
        for expert in range(spec.moe.experts)
    ]


def expert_tensors(spec: ModelSpec) -> set[str]:
    """Every name that a tensor of experts may have."""
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
