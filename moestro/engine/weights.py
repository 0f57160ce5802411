"""From a checkpoint's tensors to a decoder's weights.

Owns: which dense tensor goes where. Routed experts are never loaded here: `engine.expert_files`
only locates their bytes, and the expert cache reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

import torch

from moestro.engine.attention_weights import attention_weights
from moestro.engine.checkpoint import Checkpoint, TensorRef
from moestro.engine.expert_files import expert_tensors
from moestro.engine.models.spec import ModelSpec, MoESpec, Norm
from moestro.engine.packed_dense import assemble_matrix
from moestro.engine.quantized import PackedTensors
from moestro.engine.reading import Read, Shape, join_rows
from moestro.engine.tensor_reader import TensorReader
from moestro.errors import ModelError
from moestro.kernels.packed import PackedMatrix, PackedRows, Weight


@dataclass(slots=True)
class LayerWeights:
    """Dense weights of one layer; matrices are [out, in]. A `Weight` may be packed."""

    input_norm: torch.Tensor  # [hidden]
    post_norm: torch.Tensor  # [hidden]
    # [(heads + 2 * kv_heads) * head_dim, hidden]; latent attention: [q_rank or heads * query and
    # after it kv_rank + rotated, hidden], with the norms of both vectors as q_norm and k_norm.
    qkv: Weight
    qkv_bias: torch.Tensor | None
    out: Weight  # [hidden, heads * head_dim]
    out_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    router: torch.Tensor | None  # [experts, hidden]
    gate_up: Weight | None  # dense layers: [2 * intermediate, hidden]
    down: Weight | None  # dense layers: [hidden, intermediate]
    input_norm_bias: torch.Tensor | None = None
    post_norm_bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # [heads]
    router_bias: torch.Tensor | None = None  # float32 [experts], as `MoESpec.biased` says
    shared_gate_up: Weight | None = None  # [2 * shared intermediate, hidden]
    shared_down: Weight | None = None  # [hidden, shared intermediate]
    shared_gate: torch.Tensor | None = None  # [1, hidden]
    q_up: Weight | None = None  # [heads * query, q_rank]
    k_up: torch.Tensor | None = None  # [heads, plain, kv_rank]
    v_up: torch.Tensor | None = None  # [heads, kv_rank, value]


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
        found = [getattr(self, part.name) for part in fields(self)]
        found += [getattr(layer, part.name) for layer in self.layers for part in fields(layer)]
        sizes = {id(one): one.nbytes for one in found if isinstance(one, torch.Tensor | PackedRows)}
        return sum(sizes.values())


Exists = Callable[[str], bool]


def load_dense(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    dtype: torch.dtype,
    progress: Callable[[int, int], None],
    device: str | torch.device = "cpu",
    packed: PackedTensors | None = None,
) -> DecoderWeights:
    """Read every tensor that is not an expert to `device`, many pieces at the same time. Matrices
    in `packed` stay packed where they are only multiplied with.

    `progress(done, total)` counts bytes.
    """
    dense = _dense_refs(checkpoint, spec, packed, dtype)
    with TensorReader(
        dense.refs,
        dtype,
        torch.device(device),
        progress,
        wide=frozenset(dense.wide),
        raw=frozenset(dense.raw),
    ) as reader:
        read = _Loading(checkpoint, packed, dtype, reader)
        return assemble(spec, read, _exists(checkpoint, packed))


def packed_bytes(
    checkpoint: Checkpoint, spec: ModelSpec, packed: PackedTensors, dtype: torch.dtype
) -> int:
    """Bytes of what `load_dense` will give for a quantised checkpoint."""
    return _dense_refs(checkpoint, spec, packed, dtype).nbytes


@dataclass(slots=True)
class _Loading:
    """Takes what `assemble` asks for from a reader."""

    checkpoint: Checkpoint
    packed: PackedTensors | None
    dtype: torch.dtype
    reader: TensorReader

    def __call__(self, name: str, shape: Shape, *, wide: bool = False) -> torch.Tensor:
        if self.packed is None or not self.packed.has(name):
            return self.reader.take(self.checkpoint.need(name, shape))
        matrix = self._packed(self.packed, name, *shape)
        return matrix.dequantize(torch.float32 if wide else self.dtype)

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        if self.packed is None or not self.packed.has(name):
            return self(name, shape)
        return PackedRows((self._packed(self.packed, name, *shape),))

    def _packed(self, packed: PackedTensors, name: str, n: int, k: int) -> PackedMatrix:
        pieces = packed.pieces(name, n, k)
        raw = {piece.ref.name: self.reader.take(piece.ref) for piece in pieces}
        return assemble_matrix(packed.format, n, k, pieces, raw)


@dataclass(slots=True)
class _Noting:
    """Notes what `assemble` asks for, in its order, and gives tensors without contents."""

    checkpoint: Checkpoint
    packed: PackedTensors | None
    dtype: torch.dtype
    refs: list[TensorRef] = field(default_factory=list)
    wide: set[str] = field(default_factory=set)  # names of what stays float32
    raw: set[str] = field(default_factory=set)  # names of what is read as bytes
    names: set[str] = field(default_factory=set)  # that tensors of these matrices may have
    nbytes: int = 0  # in memory, of all together

    def __call__(self, name: str, shape: Shape, *, wide: bool = False) -> torch.Tensor:
        if self.packed is not None and self.packed.has(name):
            self._note(self.packed, name, *shape)
        else:
            self.refs.append(self.checkpoint.need(name, shape))
            self.names.add(name)
            if wide:
                self.wide.add(name)
        return torch.empty(shape, dtype=torch.float32 if wide else self.dtype, device="meta")

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        if self.packed is None or not self.packed.has(name):
            return self(name, shape)
        self._note(self.packed, name, *shape)
        form = self.packed.format
        data = torch.empty(form.nbytes(*shape), dtype=torch.uint8, device="meta")
        return PackedRows((PackedMatrix(form, *shape, data),))

    def _note(self, packed: PackedTensors, name: str, n: int, k: int) -> None:
        found = [piece.ref for piece in packed.pieces(name, n, k)]
        self.refs += found
        self.raw.update(ref.name for ref in found)
        self.names |= packed.names(name)


def _dense_refs(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    packed: PackedTensors | None,
    dtype: torch.dtype = torch.float32,
) -> _Noting:
    """ModelError when one is missing or misshapen."""
    noting = _Noting(checkpoint, packed, dtype)
    noting.nbytes = assemble(spec, noting, _exists(checkpoint, packed)).nbytes()
    return noting


def _exists(checkpoint: Checkpoint, packed: PackedTensors | None) -> Exists:
    def exists(name: str) -> bool:
        return name in checkpoint.tensors or (packed is not None and packed.has(name))

    return exists


def dummy_dense(
    spec: ModelSpec, dtype: torch.dtype, seed: int, device: str | torch.device = "cpu"
) -> DecoderWeights:
    """Seeded random weights of the right shapes: N(0, 0.02), embeddings N(0, 1), norms 1.

    They are drawn on `device`; another kind of device draws other numbers from the same seed.
    """
    generator = torch.Generator(device).manual_seed(seed)
    return assemble(spec, _MadeUp(spec, dtype, generator), lambda name: True)


@dataclass(slots=True)
class _MadeUp:
    """Draws what `assemble` asks for."""

    spec: ModelSpec
    dtype: torch.dtype
    generator: torch.Generator

    def __call__(self, name: str, shape: Shape, *, wide: bool = False) -> torch.Tensor:
        kind, device = torch.float32 if wide else self.dtype, self.generator.device
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, dtype=kind, device=device)
        std = 1.0 if name.startswith(self.spec.names.embedding) else 0.02
        empty = torch.empty(shape, dtype=kind, device=device)
        return empty.normal_(0.0, std, generator=self.generator)

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        return self(name, shape)


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
    input_norm, input_norm_bias = _norm(spec, names.input_norm.format(l=index), read)
    post_norm, post_norm_bias = _norm(spec, names.post_norm.format(l=index), read)
    weights = LayerWeights(
        **attention_weights(spec, index, read),
        input_norm=input_norm,
        post_norm=post_norm,
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


def _mlp(
    spec: ModelSpec, templates: tuple[str, ...], index: int, width: int, read: Read
) -> tuple[Weight, Weight]:
    """gate_up [2 * width, hidden] and down [hidden, width], from three modules or from two."""
    *ups, down = (name.format(l=index) for name in templates)
    rows = 2 * width // len(ups)
    gate_up = join_rows([read.matrix(f"{name}.weight", (rows, spec.hidden)) for name in ups])
    return gate_up, read.matrix(f"{down}.weight", (spec.hidden, width))


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


def check_tensors(
    checkpoint: Checkpoint, spec: ModelSpec, packed: PackedTensors | None = None
) -> None:
    """Raise if a dense tensor is missing or of a wrong shape, or one has no place in the model.

    Reads headers only, so that a damaged checkpoint is found before anything is loaded.
    """
    expected = _dense_refs(checkpoint, spec, packed).names | expert_tensors(spec, packed)
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
