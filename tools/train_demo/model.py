"""The demo network while it trains: Qwen3-MoE's mathematics and names, with stacked experts.

Every expert computes every token and a mask keeps the chosen four. That is eight times the
arithmetic of the real thing, but at this size it is one large matrix product without gathers or
host waits, and trains fast enough. Serving and generation are not here: the exported checkpoint
goes to transformers or to Moestro for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .chat import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network, named as in Qwen3-MoE's config.json."""

    hidden_size: int = 128
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 80
    vocab_size: int = VOCAB_SIZE
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """A projection without bias that keeps its input's variance, times `scale`."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=scale / math.sqrt(inputs))
    return layer


def rope_tables(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, [length, head_dim / 2]."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    angles = torch.arange(length, device=device)[:, None] / shape.rope_theta**exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary position embedding; the two halves of a head are the two coordinates of each pair."""
    cos, sin = rope
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, shape: Shape, depth_scale: float) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        queries, keys = (
            shape.num_attention_heads * shape.head_dim,
            shape.num_key_value_heads * shape.head_dim,
        )
        self.q_proj = linear(shape.hidden_size, queries)
        self.k_proj = linear(shape.hidden_size, keys)
        self.v_proj = linear(shape.hidden_size, keys)
        self.o_proj = linear(queries, shape.hidden_size, depth_scale)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], visible: Tensor) -> Tensor:
        """Attend where `visible`, [rows, 1, length, length], allows it."""
        split = (*x.shape[:2], -1, self.head_dim)  # [rows, length, heads, head_dim]
        q = rotate(self.q_norm(self.q_proj(x).view(split)).transpose(1, 2), rope)
        k = rotate(self.k_norm(self.k_proj(x).view(split)).transpose(1, 2), rope)
        v = self.v_proj(x).view(split).transpose(1, 2)
        # Fused kernels that take a mask know no grouped heads: repeat keys and values for them.
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        # The norms compute in float32 under autocast; attention wants one type.
        out = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask=visible)
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged


class Experts(nn.Module):
    """The router and all experts of a layer; returns its output and its balance loss."""

    def __init__(self, shape: Shape, depth_scale: float) -> None:
        super().__init__()
        hidden, inner, experts = shape.hidden_size, shape.moe_intermediate_size, shape.num_experts
        self.chosen = shape.num_experts_per_tok
        self.gate = linear(hidden, experts)
        # Experts lie one after the other, so that all of them are one matrix product.
        self.gate_proj = nn.Parameter(torch.randn(experts * inner, hidden) / math.sqrt(hidden))
        self.up_proj = nn.Parameter(torch.randn(experts * inner, hidden) / math.sqrt(hidden))
        self.down_proj = nn.Parameter(
            torch.randn(experts, hidden, inner) * depth_scale / math.sqrt(inner)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Route and compute every token of x, [rows, length, hidden]."""
        tokens = x.flatten(0, 1)  # [tokens, hidden]
        share = self.gate(tokens).float().softmax(-1)  # [tokens, experts]
        top, picked = share.topk(self.chosen, -1)
        weight = torch.zeros_like(share).scatter(1, picked, top / top.sum(-1, keepdim=True))
        used = (weight > 0).float().mean(0) / self.chosen
        balance = share.shape[1] * (used * share.mean(0)).sum()  # 1 when all experts are used alike
        inner = F.silu(F.linear(tokens, self.gate_proj)) * F.linear(tokens, self.up_proj)
        inner = inner.view(len(tokens), share.shape[1], -1) * weight.to(inner.dtype)[..., None]
        down = self.down_proj.transpose(1, 2).flatten(0, 1)  # [experts * inner, hidden]
        return (inner.flatten(1) @ down.to(inner.dtype)).view_as(x), balance


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        depth_scale = 1 / math.sqrt(2 * shape.num_hidden_layers)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, depth_scale)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Experts(shape, depth_scale)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention, then experts, each added to what came in."""
        x = x + self.self_attn(self.input_layernorm(x), rope, visible)
        moved, balance = self.mlp(self.post_attention_layernorm(x))
        return x + moved, balance


class DemoModel(nn.Module):
    """The whole network."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = linear(shape.hidden_size, shape.vocab_size, 0.5)

    def forward(self, ids: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [rows, length, vocabulary] and the mean balance loss.

        `owner` keeps packed conversations apart: attention stays within equal numbers.
        """
        length = ids.shape[1]
        order = torch.arange(length, device=ids.device)
        same = owner[:, None, :, None] == owner[:, None, None, :]
        visible = same & (order[:, None] >= order[None, :])  # [rows, 1, length, length]
        rope = rope_tables(self.shape, length, ids.device)
        x = self.embed_tokens(ids)
        balance = torch.zeros((), device=ids.device)
        for layer in self.layers:
            x, layer_balance = layer(x, rope, visible)
            balance = balance + layer_balance
        return self.lm_head(self.norm(x)), balance / len(self.layers)
