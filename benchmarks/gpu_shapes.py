"""Shapes of published models for the GPU benchmarks, and checkpoints of random weights in them.

Weights are N(0, 0.02), embeddings N(0, 1) and norms 1, as the peers were measured with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Shape:
    """A model's sizes. `attention` counts the parameters of a layer's projections."""

    kind: str  # model_type
    layers: int
    vocab: int
    hidden: int
    heads: int
    kv_heads: int
    experts: int
    top_k: int
    intermediate: int
    head_dim: int = 128

    @property
    def blob(self) -> int:
        """Bytes of an expert in bf16."""
        return 3 * self.hidden * self.intermediate * 2

    def touched(self, streams: int, experts: float) -> float:
        """Bytes that a decode step reads: dense weights and experts once, KV of 200 tokens."""
        width = self.heads * self.head_dim
        kv = self.kv_heads * self.head_dim
        layer = (2 * width + 2 * kv + self.experts) * self.hidden * 2
        dense = self.layers * layer + self.vocab * self.hidden * 2
        return dense + experts * self.blob + streams * self.layers * 200 * 2 * kv * 2

    def write_config(self, folder: Path) -> Path:
        """A folder with the config alone, for dummy weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self._config()))
        return folder

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "model_type": self.kind,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts_per_tok": self.top_k,
            "vocab_size": self.vocab,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        if self.kind == "mixtral":
            return config | {
                "architectures": ["MixtralForCausalLM"],
                "num_local_experts": self.experts,
                "intermediate_size": self.intermediate,
            }
        return config | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": self.experts,
            "moe_intermediate_size": self.intermediate,
            "intermediate_size": 6144,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
        }

    def write_checkpoint(self, folder: Path, device: str, half: bool = False) -> Path:
        """A Qwen3-MoE checkpoint, a file a layer. `half`: routers never choose an odd expert."""
        assert self.kind == "qwen3_moe"
        self.write_config(folder)
        generator = torch.Generator(device).manual_seed(1)

        def random(*shape: int, scale: float = 0.02) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
            return values.mul_(scale).cpu()

        places: dict[str, str] = {}

        def save(name: str, tensors: dict[str, torch.Tensor]) -> None:
            save_file(tensors, folder / name, metadata={"format": "pt"})
            places.update(dict.fromkeys(tensors, name))

        width, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        ones = torch.ones
        save(
            "ends.safetensors",
            {
                "model.embed_tokens.weight": random(self.vocab, self.hidden, scale=1.0),
                "lm_head.weight": random(self.vocab, self.hidden),
                "model.norm.weight": ones(self.hidden, dtype=torch.bfloat16),
            },
        )
        for index in range(self.layers):
            at = f"model.layers.{index}."
            router = random(self.experts, self.hidden)
            if half:
                router[1::2] = 0  # half of the others are above zero: many more than top-k
            layer = {
                "self_attn.q_proj.weight": random(width, self.hidden),
                "self_attn.k_proj.weight": random(kv, self.hidden),
                "self_attn.v_proj.weight": random(kv, self.hidden),
                "self_attn.o_proj.weight": random(self.hidden, width),
                "self_attn.q_norm.weight": ones(self.head_dim, dtype=torch.bfloat16),
                "self_attn.k_norm.weight": ones(self.head_dim, dtype=torch.bfloat16),
                "input_layernorm.weight": ones(self.hidden, dtype=torch.bfloat16),
                "post_attention_layernorm.weight": ones(self.hidden, dtype=torch.bfloat16),
                "mlp.gate.weight": router,
            }
            for expert in range(self.experts):
                name = f"mlp.experts.{expert}."
                layer[name + "gate_proj.weight"] = random(self.intermediate, self.hidden)
                layer[name + "up_proj.weight"] = random(self.intermediate, self.hidden)
                layer[name + "down_proj.weight"] = random(self.hidden, self.intermediate)
            save(f"layer-{index}.safetensors", {at + key: value for key, value in layer.items()})
        index_file = folder / "model.safetensors.index.json"
        index_file.write_text(json.dumps({"metadata": {}, "weight_map": places}))
        return folder


SHAPES = {
    "qwen3": Shape("qwen3_moe", 48, 151_936, 2048, 32, 4, 128, 8, 768),
    "mixtral": Shape("mixtral", 32, 32_000, 4096, 32, 8, 8, 2, 14_336),
}
