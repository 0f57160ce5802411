"""Tiny random checkpoints, one row per model family, stored as the hub stores the real ones.

Owns: config.json, safetensors and the numbers in them. Does not own: which checkpoints the tests
use (`specs`), or what transformers makes of them (`golden`).

Scales follow fan-in, so that activations stay near 1, every expert is chosen by some token and
logits spread by about 4: with the usual N(0, 0.02) a model this small says one token for ever.
Values lie on the bfloat16 grid: the same weights, whichever dtype the file has.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.oracle import vocabulary

LOGIT_SPREAD = 4.0
ROUTER_GAIN = 1.5


@dataclass(frozen=True)
class Spec:
    """A tiny checkpoint. Two equal specs give equal files."""

    family: str
    seed: int
    hidden: int = 48
    layers: int = 3
    experts: int = 8
    top_k: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_width: int | None = None  # None: hidden / heads
    intermediate: int = 32  # of one expert
    dense_intermediate: int = 64  # of a dense layer
    vocab: int = 288  # more than the tokenizer has, as on the hub
    context: int = 512
    tied: bool = False
    norm_topk: bool = True
    mlp_only_layers: tuple[int, ...] = ()
    sparse_step: int = 1
    dtype: str = "float32"
    shards: int = 1
    packed: bool = False  # experts as one [E, ...] tensor a layer, as newer checkpoints have them
    v5_config: bool = False  # the key names that transformers 5 writes, else those on the hub
    rope_theta: float = 10000.0
    extra: tuple[tuple[str, object], ...] = field(default=())  # more config.json keys

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.head_width or self.hidden // self.heads

    def is_sparse(self, layer: int) -> bool:
        """Whether `layer` has experts rather than one dense MLP."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.sparse_step == 0


@dataclass(frozen=True)
class Family:
    """What the names and shapes of one family are."""

    architecture: str
    config: Callable[[Spec], dict[str, object]]
    block: str  # where the router and the experts are
    expert: tuple[str, str, str]  # names of gate, up and down
    qk_norm: Callable[[Spec], tuple[int, int] | None] = lambda spec: None  # widths of the two


def _qwen3_moe(spec: Spec) -> dict[str, object]:
    return {
        "head_dim": spec.head_dim,
        "num_local_experts" if spec.v5_config else "num_experts": spec.experts,
        "moe_intermediate_size": spec.intermediate,
        "intermediate_size": spec.dense_intermediate,
        "norm_topk_prob": spec.norm_topk,
        "decoder_sparse_step": spec.sparse_step,
        "mlp_only_layers": list(spec.mlp_only_layers),
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "rms_norm_eps": 1e-6,
    }


def _olmoe(spec: Spec) -> dict[str, object]:
    return {
        "num_experts": spec.experts,
        "intermediate_size": spec.intermediate,
        "norm_topk_prob": spec.norm_topk,
        "attention_bias": False,
        "clip_qkv": None,
        "rms_norm_eps": 1e-5,
    }


def _mixtral(spec: Spec) -> dict[str, object]:
    return {
        "num_local_experts": spec.experts,
        "intermediate_size": spec.intermediate,
        "router_jitter_noise": 0.0,
        **({"head_dim": spec.head_dim} if spec.head_width else {}),
        "sliding_window": None,
        "rms_norm_eps": 1e-5,
    }


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
FAMILIES = {
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        _qwen3_moe,
        "mlp",
        _PROJECTIONS,
        lambda spec: (spec.head_dim, spec.head_dim),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        _olmoe,
        "mlp",
        _PROJECTIONS,
        lambda spec: (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim),
    ),
    "mixtral": Family("MixtralForCausalLM", _mixtral, "block_sparse_moe", ("w1", "w3", "w2")),
}


def make(folder: Path, spec: Spec) -> Path:
    """Write the whole checkpoint of `spec` into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    dump(folder / "config.json", config(spec))
    ids = {"bos_token_id": vocabulary.BOS, "eos_token_id": vocabulary.EOS}
    dump(folder / "generation_config.json", ids)
    vocabulary.write(folder, vocabulary.build(), max_length=spec.context)
    save(folder, dict(tensors(spec)), shards=spec.shards)
    return folder


def config(spec: Spec) -> dict[str, object]:
    """The config.json of `spec`."""
    family = FAMILIES[spec.family]
    if spec.v5_config:
        rope: dict[str, object] = {"rope_type": "default", "rope_theta": spec.rope_theta}
        style: dict[str, object] = {"dtype": spec.dtype, "rope_parameters": rope}
    else:
        style = {"torch_dtype": spec.dtype, "rope_theta": spec.rope_theta, "rope_scaling": None}
    return {
        "architectures": [family.architecture],
        "model_type": spec.family,
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "num_experts_per_tok": spec.top_k,
        "hidden_act": "silu",
        "max_position_embeddings": spec.context,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": vocabulary.BOS,
        "eos_token_id": vocabulary.EOS,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "use_cache": True,
        **style,
        **family.config(spec),
        **dict(spec.extra),
    }


def tensors(spec: Spec) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the checkpoint under the name it has on the hub."""
    draw = _Drawer(spec)
    # Tied rows must be small, or the row of the current token wins every argmax.
    yield draw.normal("model.embed_tokens.weight", (spec.vocab, spec.hidden), 0.15, untied=1.0)
    for layer in range(spec.layers):
        yield from _attention(spec, draw, f"model.layers.{layer}.")
        sparse = spec.is_sparse(layer)
        yield from (_sparse if sparse else _dense)(spec, draw, f"model.layers.{layer}.")
    yield draw.norm("model.norm.weight", spec.hidden)
    if not spec.tied:
        yield draw.linear("lm_head.weight", (spec.vocab, spec.hidden), LOGIT_SPREAD)


def _attention(spec: Spec, draw: _Drawer, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield draw.norm(prefix + "input_layernorm.weight", spec.hidden)
    yield draw.norm(prefix + "post_attention_layernorm.weight", spec.hidden)
    yield draw.linear(prefix + "self_attn.q_proj.weight", (queries, spec.hidden))
    yield draw.linear(prefix + "self_attn.k_proj.weight", (keys, spec.hidden))
    yield draw.linear(prefix + "self_attn.v_proj.weight", (keys, spec.hidden))
    # A strong running average of the past is a fixed point that tied models fall into.
    yield draw.linear(prefix + "self_attn.o_proj.weight", (spec.hidden, queries), 0.15, untied=1.0)
    widths = FAMILIES[spec.family].qk_norm(spec)
    for name, width in zip(("q_norm", "k_norm"), widths or (), strict=False):
        yield draw.norm(f"{prefix}self_attn.{name}.weight", width)


def _dense(spec: Spec, draw: _Drawer, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ("gate_proj", "up_proj"):
        shape = (spec.dense_intermediate, spec.hidden)
        yield draw.linear(f"{prefix}mlp.{name}.weight", shape)
    yield draw.down(f"{prefix}mlp.down_proj.weight", (spec.hidden, spec.dense_intermediate))


def _sparse(spec: Spec, draw: _Drawer, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    family = FAMILIES[spec.family]
    # transformers names the block `mlp` in memory, and so do packed checkpoints.
    block = prefix + ("mlp" if spec.packed else family.block)
    yield draw.linear(f"{block}.gate.weight", (spec.experts, spec.hidden), ROUTER_GAIN)
    ups, downs = [], []
    for expert in range(spec.experts):
        gate, up, down = (f"{block}.experts.{expert}.{name}.weight" for name in family.expert)
        three = (
            draw.linear(gate, (spec.intermediate, spec.hidden)),
            draw.linear(up, (spec.intermediate, spec.hidden)),
            draw.down(down, (spec.hidden, spec.intermediate)),
        )
        if not spec.packed:
            yield from three
        ups.append(torch.cat([three[0][1], three[1][1]]))
        downs.append(three[2][1])
    if spec.packed:
        yield f"{block}.experts.gate_up_proj", torch.stack(ups)  # [E, 2I, H]
        yield f"{block}.experts.down_proj", torch.stack(downs)  # [E, H, I]


@dataclass(frozen=True)
class _Drawer:
    """Draws a named tensor. Its numbers depend on the name alone, not on the order of drawing."""

    spec: Spec

    def normal(
        self, name: str, shape: tuple[int, ...], spread: float, *, untied: float | None = None
    ) -> tuple[str, torch.Tensor]:
        """N(0, spread), with `untied` in place of it when the embeddings are not tied."""
        if untied is not None and not self.spec.tied:
            spread = untied
        seed = zlib.crc32(f"{self.spec.family}:{self.spec.seed}:{name}".encode())
        values = np.random.RandomState(seed).standard_normal(shape) * spread
        return name, self._cast(torch.from_numpy(values))

    def norm(self, name: str, width: int) -> tuple[str, torch.Tensor]:
        """A norm weight near 1."""
        tensor = self.normal(name, (width,), 0.1)[1].double()
        return name, self._cast(1 + tensor)

    def linear(
        self, name: str, shape: tuple[int, int], gain: float = 1.0, *, untied: float | None = None
    ) -> tuple[str, torch.Tensor]:
        """A projection [out, in] that keeps the spread of its input times the gain."""
        root = shape[1] ** 0.5
        return self.normal(
            name, shape, gain / root, untied=None if untied is None else untied / root
        )

    def down(self, name: str, shape: tuple[int, int]) -> tuple[str, torch.Tensor]:
        """The last matrix of an MLP; strong when tied, so that tokens map to random ones."""
        return self.linear(name, shape, 2.5, untied=1.4)

    def _cast(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).to(getattr(torch, self.spec.dtype)).contiguous()


def save(folder: Path, weights: dict[str, torch.Tensor], *, shards: int = 1) -> None:
    """Write one safetensors file, or `shards` of them and their index."""
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    index: dict[str, str] = {}
    for shard in range(shards):
        # Every nth tensor, so that one expert's matrices lie in different files.
        part = {name: weights[name] for name in names[shard::shards]}
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(t.numel() * t.element_size() for t in weights.values())
    dump(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": size}, "weight_map": index},
    )


def dump(path: Path, value: object) -> None:
    """Write `value` as JSON."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
