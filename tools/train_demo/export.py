"""The demo checkpoint on disk: hub tensor names, config, tokenizer, chat template; reading it back.

Training calls `save_checkpoint` when it ends. The model card is written apart (card.py), once
scores are known.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from .chat import CHAT_TEMPLATE, END_OF_TEXT, IM_END, SPECIAL_TOKENS
from .model import DemoModel, Shape

POSITIONS = 16_384  # far above the trained length: load tests need long prompts to be accepted
STACKED = re.compile(r"layers\.\d+\.mlp\.(gate_proj|up_proj|down_proj)$")


def hub_tensors(model: DemoModel) -> dict[str, Tensor]:
    """The weights in bf16 under Qwen3-MoE's published names, one tensor an expert's projection."""
    tensors: dict[str, Tensor] = {}
    experts = model.shape.num_experts
    for name, value in model.state_dict().items():
        value = value.detach().to("cpu", torch.bfloat16)
        if not STACKED.fullmatch(name):
            tensors[name if name.startswith("lm_head") else f"model.{name}"] = value.contiguous()
            continue
        prefix, projection = name.rsplit(".", 1)
        for expert, weight in enumerate(value.view(experts, -1, value.shape[-1])):
            tensors[f"model.{prefix}.experts.{expert}.{projection}.weight"] = weight.clone()
    return tensors


def load_tensors(model: DemoModel, folder: Path) -> None:
    """Fill the training model from a saved checkpoint."""
    saved = load_file(folder / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not STACKED.fullmatch(name):
            state[name] = saved[name if name.startswith("lm_head") else f"model.{name}"]
            continue
        prefix, projection = name.rsplit(".", 1)
        experts = range(model.shape.num_experts)
        parts = [
            saved[f"model.{prefix}.experts.{expert}.{projection}.weight"] for expert in experts
        ]
        state[name] = torch.stack(parts).view(value.shape)
    model.load_state_dict(state)


def model_config(shape: Shape) -> dict[str, Any]:
    """config.json. `rope_theta` and `torch_dtype` repeat newer keys under their older names."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **asdict(shape),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": END_OF_TEXT,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": IM_END,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "intermediate_size": 4 * shape.hidden_size,  # of dense layers, of which there are none
        "max_position_embeddings": POSITIONS,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "output_router_logits": False,
        "pad_token_id": END_OF_TEXT,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "router_aux_loss_coef": 0.01,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
    }


# Each right answer is one text, so sampling far from the likeliest token can only spoil it. Clients
# that send no temperature get the server's default, which many servers take from this file.
GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": [IM_END, END_OF_TEXT],
    "pad_token_id": END_OF_TEXT,
    "do_sample": True,
    "temperature": 0.1,
    "top_p": 0.9,
}


def build_tokenizer() -> Tokenizer:
    """A byte-level tokenizer without merges. Byte b is token b."""
    alphabet = _byte_letters()
    tokenizer = Tokenizer(
        BPE(vocab={letter: byte for byte, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in SPECIAL_TOKENS.values()]
    )
    return tokenizer


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary, in byte order.

    Printable Latin-1 bytes stand for themselves; the others get the code points from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": SPECIAL_TOKENS[END_OF_TEXT],
    "eos_token": SPECIAL_TOKENS[IM_END],
    "pad_token": SPECIAL_TOKENS[END_OF_TEXT],
    "add_bos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": POSITIONS,
    "chat_template": CHAT_TEMPLATE,
}


def save_checkpoint(model: DemoModel, folder: Path) -> None:
    """Write everything but the card."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(hub_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    build_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", model_config(model.shape))
    _write_json(folder / "generation_config.json", GENERATION_CONFIG)
    _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
