"""From a checkpoint's tensors to a decoder's weights and the experts' byte ranges.

Owns: which tensor goes where. Experts are never loaded here: their bytes are only located, so
that the expert cache can read them from the checkpoint's own files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from moestro.engine.checkpoint import Checkpoint, TensorRef, check_ref, load_tensor
from moestro.engine.models.spec import ExpertNames, LayerSpec, ModelSpec, QKNorm
from moestro.errors import ModelError
from moestro.expert_cache.layout import ExpertSource, Extent

Shape = tuple[int, ...]


@dataclass(slots=True)
class LayerWeights:
    """Dense weights of one layer; matrices are [out, in]."""

    input_norm: torch.Tensor  # [hidden]
    post_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    out: torch.Tensor  # [hidden, heads * head_dim]
    out_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    router: torch.Tensor | None  # [experts, hidden]
    gate_up: torch.Tensor | None  # dense layers: [2 * intermediate, hidden]
    down: torch.Tensor | None  # dense layers: [hidden, intermediate]


@dataclass(slots=True)
class DecoderWeights:
    """All weights that stay on the device."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden], the embedding itself when tied

    def nbytes(self) -> int:
        """Bytes in memory, a tied head counted once."""
        seen: dict[int, int] = {}
        for layer in self.layers:
            for tensor in (getattr(layer, name) for name in LayerWeights.__slots__):
                if tensor is not None:
                    seen[tensor.data_ptr()] = tensor.nbytes
        for tensor in (self.embedding, self.final_norm, self.head):
            seen[tensor.data_ptr()] = tensor.nbytes
        return sum(seen.values())


Read = Callable[[str, Shape], torch.Tensor]


def load_dense(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
    device: str | torch.device = "cpu",
) -> DecoderWeights:
    """Read every tensor that is not an expert, each to `device` before the next is read.

    `progress(done, total)` counts bytes.
    """
    total = sum(ref.nbytes for ref in checkpoint.tensors.values() if ".experts." not in ref.name)
    done = 0

    def read(name: str, shape: Shape) -> torch.Tensor:
        nonlocal done
        ref = checkpoint.need(name, shape)
        done += ref.nbytes
        progress(done, total)
        return load_tensor(ref, dtype, device)

    return assemble(spec, read, lambda names: checkpoint.find(names) is not None)


def dummy_dense(
    spec: ModelSpec, dtype: torch.dtype, seed: int, device: str | torch.device = "cpu"
) -> DecoderWeights:
    """Seeded random weights of the right shapes: N(0, 0.02), embeddings N(0, 1), norms 1.

    They are drawn on `device`; another kind of device draws other numbers from the same seed.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def read(name: str, shape: Shape) -> torch.Tensor:
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, dtype=dtype, device=device)
        std = 1.0 if "embed_tokens" in name else 0.02
        empty = torch.empty(shape, dtype=dtype, device=device)
        return empty.normal_(0.0, std, generator=generator)

    return assemble(spec, read, lambda names: True)


def assemble(
    spec: ModelSpec, read: Read, exists: Callable[[tuple[str, ...]], bool]
) -> DecoderWeights:
    """Build the decoder's weights by asking `read(name, shape)` for every tensor."""
    embedding = read("model.embed_tokens.weight", (spec.vocab_size, spec.hidden))
    layers = [_layer(spec, index, read, exists) for index in range(len(spec.layers))]
    norm = read("model.norm.weight", (spec.hidden,))
    head = embedding if spec.tied_head else read("lm_head.weight", (spec.vocab_size, spec.hidden))
    return DecoderWeights(embedding, layers, norm, head)


def _layer(
    spec: ModelSpec, index: int, read: Read, exists: Callable[[tuple[str, ...]], bool]
) -> LayerWeights:
    layer, hidden = spec.layers[index], spec.hidden
    attention = layer.attention
    prefix = f"model.layers.{index}."
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim

    def stack(ends: tuple[tuple[str, int], ...], suffix: str, *shape: int) -> torch.Tensor:
        return torch.cat([read(f"{prefix}{end}.{suffix}", (rows, *shape)) for end, rows in ends])

    projections = (("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv))
    q_norm, k_norm = _qk_norm_shapes(layer)
    router, gate_up, down = None, None, None
    if layer.moe is None:
        ends = (("mlp.gate_proj", layer.intermediate), ("mlp.up_proj", layer.intermediate))
        gate_up = stack(ends, "weight", hidden)
        down = read(prefix + "mlp.down_proj.weight", (hidden, layer.intermediate))
    else:
        names = tuple(name.format(l=index) for name in spec.names.router)
        name = next((n for n in names if exists((n,))), names[0])
        router = read(name, (layer.moe.experts, hidden))
    return LayerWeights(
        input_norm=read(prefix + "input_layernorm.weight", (hidden,)),
        post_norm=read(prefix + "post_attention_layernorm.weight", (hidden,)),
        qkv=stack(projections, "weight", hidden),
        qkv_bias=stack(projections, "bias") if attention.qkv_bias else None,
        out=read(prefix + "self_attn.o_proj.weight", (hidden, q)),
        out_bias=read(prefix + "self_attn.o_proj.bias", (hidden,)) if attention.out_bias else None,
        q_norm=read(prefix + "self_attn.q_norm.weight", q_norm) if q_norm else None,
        k_norm=read(prefix + "self_attn.k_norm.weight", k_norm) if k_norm else None,
        router=router,
        gate_up=gate_up,
        down=down,
    )


def _qk_norm_shapes(layer: LayerSpec) -> tuple[Shape | None, Shape | None]:
    attention = layer.attention
    if attention.qk_norm is QKNorm.NONE:
        return None, None
    if attention.qk_norm is QKNorm.HEAD:
        return (attention.head_dim,), (attention.head_dim,)
    return (attention.heads * attention.head_dim,), (attention.kv_heads * attention.head_dim,)


def expert_sources(checkpoint: Checkpoint, spec: ModelSpec) -> list[ExpertSource]:
    """Byte ranges of every expert, layer by layer; `ExpertSource.layer` counts MoE layers."""
    return [
        ExpertSource(ordinal, expert, _extents(checkpoint, spec, layer, expert))
        for ordinal, layer in enumerate(spec.moe_layers)
        for expert in range(spec.moe.experts)
    ]


def _extents(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int, expert: int
) -> tuple[Extent, ...]:
    width, hidden, count = spec.moe.intermediate, spec.hidden, spec.moe.experts
    for names in spec.names.experts:
        gate, up, down = (name.format(l=layer, e=expert) for name in names.each)
        if gate in checkpoint.tensors:
            need = checkpoint.need
            return (
                _extent(need(gate, (width, hidden)), "gate_up", 0, width),
                _extent(need(up, (width, hidden)), "gate_up", width, width),
                _extent(need(down, (hidden, width)), "down", 0, hidden),
            )
        packed = _packed(checkpoint, names, layer)
        if packed is not None:
            gate_up = check_ref(packed[0], (count, 2 * width, hidden))
            stacked = check_ref(packed[1], (count, hidden, width))
            return (
                _extent(gate_up, "gate_up", 0, 2 * width, expert, count),
                _extent(stacked, "down", 0, hidden, expert, count),
            )
    tried = spec.names.experts[0].each[0].format(l=layer, e=expert)
    raise ModelError(f"layer {layer} has no expert {expert}: {tried} is missing")


def _packed(
    checkpoint: Checkpoint, names: ExpertNames, layer: int
) -> tuple[TensorRef, TensorRef] | None:
    gate_up, down = (checkpoint.tensors.get(name.format(l=layer)) for name in names.packed)
    if gate_up is None or down is None:
        return None
    return gate_up, down


def _extent(
    ref: TensorRef, part: str, row: int, rows: int, index: int = 0, count: int = 1
) -> Extent:
    size = ref.nbytes // count
    return Extent(ref.path, ref.offset + index * size, size, ref.dtype, part, row, rows)


def check_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Raise if a dense tensor is missing or of a wrong shape, or one has no place in the model.

    Reads headers only, so that a damaged checkpoint is found before anything is loaded.
    """
    expected = _expected_names(checkpoint, spec)
    extra = sorted(
        name
        for name in checkpoint.tensors
        if name not in expected and not name.endswith("rotary_emb.inv_freq")
    )
    if spec.tied_head:
        extra = [name for name in extra if name != "lm_head.weight"]
    if extra:
        raise ModelError(
            f"{len(extra)} tensors have no place in a {spec.family} model: {', '.join(extra[:5])}"
        )


def _expected_names(checkpoint: Checkpoint, spec: ModelSpec) -> set[str]:
    names: set[str] = set()

    def read(name: str, shape: Shape) -> torch.Tensor:
        names.add(checkpoint.need(name, shape).name)
        return torch.empty(shape, device="meta")

    assemble(spec, read, lambda options: checkpoint.find(options) is not None)
    for layer in spec.moe_layers:
        for each in spec.names.experts:
            names.update(name.format(l=layer) for name in each.packed)
            for expert in range(spec.moe.experts):
                names.update(name.format(l=layer, e=expert) for name in each.each)
    return names
