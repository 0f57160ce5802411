"""From a checkpoint's tensors to a decoder's weights.

Owns: which dense tensor goes where. Routed experts are never loaded here: `engine.expert_files`
only locates their bytes, and the expert cache reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import torch

from moestro.engine.checkpoint import Checkpoint, TensorRef
from moestro.engine.expert_files import expert_tensors
from moestro.engine.models.rope import RopeSpec
from moestro.engine.models.spec import AttentionSpec, ModelSpec, MoESpec, Norm, QKNorm
from moestro.engine.tensor_reader import TensorReader
from moestro.errors import ModelError

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
    input_norm_bias: torch.Tensor | None = None
    post_norm_bias: torch.Tensor | None = None
    router_bias: torch.Tensor | None = None  # float32 [experts], to choose by
    shared_gate_up: torch.Tensor | None = None  # [2 * shared intermediate, hidden]
    shared_down: torch.Tensor | None = None  # [hidden, shared intermediate]
    shared_gate: torch.Tensor | None = None  # [1, hidden]


@dataclass(slots=True)
class DecoderWeights:
    """All weights that stay on the device."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden], the embedding itself when tied
    final_norm_bias: torch.Tensor | None = None
    head_bias: torch.Tensor | None = None  # [vocab]

    def nbytes(self) -> int:
        """Bytes in memory, a tied head counted once."""
        found = [getattr(self, field.name) for field in fields(self)]
        found += [getattr(layer, field.name) for layer in self.layers for field in fields(layer)]
        tensors = {t.data_ptr(): t.nbytes for t in found if isinstance(t, torch.Tensor)}
        return sum(tensors.values())


class Read(Protocol):
    """Gives the tensor of a name and a shape, in the compute dtype or float32 (`wide`)."""

    def __call__(self, name: str, shape: Shape, *, wide: bool = False) -> torch.Tensor:
        """ModelError when it is missing or of another shape."""


Exists = Callable[[str], bool]


def load_dense(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
    device: str | torch.device = "cpu",
) -> DecoderWeights:
    """Read every tensor that is not an expert to `device`, many pieces at the same time.

    `progress(done, total)` counts bytes.
    """
    refs, wide_names = _dense_refs(checkpoint, spec)
    with TensorReader(refs, dtype, torch.device(device), progress, wide=wide_names) as reader:

        def read(name: str, shape: Shape, *, wide: bool = False) -> torch.Tensor:
            return reader.take(checkpoint.need(name, shape))

        return assemble(spec, read, checkpoint.tensors.__contains__)


def _dense_refs(checkpoint: Checkpoint, spec: ModelSpec) -> tuple[list[TensorRef], frozenset[str]]:
    """What `assemble` asks for, in its order, and which of it stays float32. ModelError when one
    is missing or misshapen."""
    refs: list[TensorRef] = []
    wide_names: set[str] = set()

    def note(name: str, shape: Shape, *, wide: bool = False) -> torch.Tensor:
        refs.append(checkpoint.need(name, shape))
        if wide:
            wide_names.add(name)
        return torch.empty(shape, device="meta")

    assemble(spec, note, checkpoint.tensors.__contains__)
    return refs, frozenset(wide_names)


def dummy_dense(
    spec: ModelSpec, dtype: torch.dtype, seed: int, device: str | torch.device = "cpu"
) -> DecoderWeights:
    """Seeded random weights of the right shapes: N(0, 0.02), embeddings N(0, 1), norms 1.

    They are drawn on `device`; another kind of device draws other numbers from the same seed.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def read(name: str, shape: Shape, *, wide: bool = False) -> torch.Tensor:
        kind = torch.float32 if wide else dtype
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, dtype=kind, device=device)
        std = 1.0 if name.startswith(spec.names.embedding) else 0.02
        empty = torch.empty(shape, dtype=kind, device=device)
        return empty.normal_(0.0, std, generator=generator)

    return assemble(spec, read, lambda name: True)


def assemble(spec: ModelSpec, read: Read, exists: Exists) -> DecoderWeights:
    """Build the decoder's weights by asking `read` for every tensor."""
    names, table = spec.names, (spec.vocab_size, spec.hidden)
    embedding = read(f"{names.embedding}.weight", table)
    layers = [_layer(spec, index, read, exists) for index in range(len(spec.layers))]
    norm, norm_bias = _norm(spec, names.final_norm, read)
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        final_norm=norm,
        head=embedding if spec.tied_head else read(f"{names.head}.weight", table),
        final_norm_bias=norm_bias,
        head_bias=read(f"{names.head}.bias", (spec.vocab_size,)) if spec.head_bias else None,
    )


def _norm(spec: ModelSpec, name: str, read: Read) -> tuple[torch.Tensor, torch.Tensor | None]:
    weight = read(f"{name}.weight", (spec.hidden,))
    return weight, read(f"{name}.bias", (spec.hidden,)) if spec.norm is Norm.LAYER else None


def _layer(spec: ModelSpec, index: int, read: Read, exists: Exists) -> LayerWeights:
    layer, names = spec.layers[index], spec.names
    attention = layer.attention
    q_norm, k_norm = _qk_norm_shapes(attention)
    out, q = names.out.format(l=index), attention.heads * attention.head_dim
    input_norm, input_norm_bias = _norm(spec, names.input_norm.format(l=index), read)
    post_norm, post_norm_bias = _norm(spec, names.post_norm.format(l=index), read)
    qkv, qkv_bias = _qkv(spec, attention, index, read)
    weights = LayerWeights(
        input_norm=input_norm,
        post_norm=post_norm,
        qkv=qkv,
        qkv_bias=qkv_bias,
        out=read(f"{out}.weight", (spec.hidden, q)),
        out_bias=read(f"{out}.bias", (spec.hidden,)) if attention.out_bias else None,
        q_norm=read(f"{names.q_norm.format(l=index)}.weight", q_norm) if q_norm else None,
        k_norm=read(f"{names.k_norm.format(l=index)}.weight", k_norm) if k_norm else None,
        router=None,
        gate_up=None,
        down=None,
        input_norm_bias=input_norm_bias,
        post_norm_bias=post_norm_bias,
    )
    if layer.moe is None:
        weights.gate_up, weights.down = _mlp(spec, names.dense, index, layer.intermediate, read)
    else:
        _add_moe(weights, spec, layer.moe, index, read, exists)
    return weights


def _qkv(
    spec: ModelSpec, attention: AttentionSpec, index: int, read: Read
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The projections to queries, keys and values as one, with its bias if there is one."""
    names = [name.format(l=index) for name in spec.names.qkv]
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    rows = (q, kv, kv) if len(names) == 3 else (q + 2 * kv,)

    def stack(suffix: str, *shape: int) -> torch.Tensor:
        parts = [read(f"{n}.{suffix}", (r, *shape)) for n, r in zip(names, rows, strict=True)]
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        return _half_split(whole, attention, spec.rope) if spec.rope.interleaved else whole

    return stack("weight", spec.hidden), stack("bias") if attention.qkv_bias else None


def _half_split(qkv: torch.Tensor, attention: AttentionSpec, rope: RopeSpec) -> torch.Tensor:
    """Rows [(heads + 2 * kv_heads) * head_dim, ...], reordered in each head of q and k: pairs 2i
    and 2i + 1 become i and i + dim / 2. Products of q and k are what they were."""
    assert attention.qk_norm is QKNorm.NONE, "its weights would have to be reordered too"
    even = torch.arange(0, rope.dim, 2, device=qkv.device)
    rest = torch.arange(rope.dim, attention.head_dim, device=qkv.device)
    order = torch.cat((even, even + 1, rest))
    heads = qkv.view(-1, attention.head_dim, *qkv.shape[1:])
    turned = attention.heads + attention.kv_heads
    return torch.cat((heads[:turned].index_select(1, order), heads[turned:])).flatten(0, 1)


def _mlp(
    spec: ModelSpec, templates: tuple[str, ...], index: int, width: int, read: Read
) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [2 * width, hidden] and down [hidden, width], from three modules or from two."""
    *ups, down = (name.format(l=index) for name in templates)
    rows = 2 * width // len(ups)
    parts = [read(f"{name}.weight", (rows, spec.hidden)) for name in ups]
    gate_up = torch.cat(parts) if len(parts) > 1 else parts[0]
    return gate_up, read(f"{down}.weight", (spec.hidden, width))


def _add_moe(
    weights: LayerWeights, spec: ModelSpec, moe: MoESpec, index: int, read: Read, exists: Exists
) -> None:
    names = spec.names

    def first(templates: tuple[str, ...]) -> str:
        options = [template.format(l=index) for template in templates]
        return next((name for name in options if exists(name)), options[0])

    weights.router = read(first(names.router), (moe.experts, spec.hidden), wide=moe.wide)
    if moe.biased:
        shape = (*(1,) * (names.router_bias_rank - 1), moe.experts)
        weights.router_bias = read(first(names.router_bias), shape, wide=True).reshape(-1)
    if moe.shared is not None:
        weights.shared_gate_up, weights.shared_down = _mlp(
            spec, names.shared, index, moe.shared.intermediate, read
        )
        if moe.shared.gated:
            gate = names.shared_gate.format(l=index)
            weights.shared_gate = read(f"{gate}.weight", (1, spec.hidden))


def _qk_norm_shapes(attention: AttentionSpec) -> tuple[Shape | None, Shape | None]:
    if attention.qk_norm is QKNorm.NONE:
        return None, None
    if attention.qk_norm is QKNorm.HEAD:
        return (attention.head_dim,), (attention.head_dim,)
    return (attention.heads * attention.head_dim,), (attention.kv_heads * attention.head_dim,)


def check_tensors(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """Raise if a dense tensor is missing or of a wrong shape, or one has no place in the model.

    Reads headers only, so that a damaged checkpoint is found before anything is loaded.
    """
    expected = {ref.name for ref in _dense_refs(checkpoint, spec)[0]} | expert_tensors(spec)
    if spec.tied_head:
        expected.add(f"{spec.names.head}.weight")
    extra = sorted(
        name
        for name in checkpoint.tensors
        if name not in expected
        and not name.endswith("rotary_emb.inv_freq")
        and not name.startswith(spec.names.unused)
    )
    if extra:
        raise ModelError(
            f"{len(extra)} tensors have no place in a {spec.family} model: {', '.join(extra[:5])}"
        )
