"""Tiny quantised checkpoints as each tool publishes them, and the same weights dequantised.

Owns: packing, written out element by element from the formats' descriptions and sharing nothing
with the engine. Does not own: the numbers (`tiny`) or what transformers makes of them (`golden`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.oracle import families, tiny, vocabulary

SPEC = tiny.Spec(
    "qwen3_moe", 13, hidden=64, layers=2, experts=4, intermediate=64, mlp_only_layers=(0,),
    dense_intermediate=80,
)  # fmt: skip
GROUP = 16
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column of each nibble, from the lowest on

Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]  # tensors by the end of their names, dequantised [n, k]


@dataclass(frozen=True)
class Scheme:
    """`pack` gives a matrix's tensors; `config` is quantization_config."""

    pack: Callable[[torch.Tensor], Packed]
    config: dict[str, Any]
    block: float = 0.0  # bytes of a packed expert for each element, padding left out


def words(nibbles: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
    """int32 [rows, c / 8] of values 0 .. 15 [rows, c]: nibble i is of column order[i]."""
    rows, columns = nibbles.shape
    out = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for place, column in enumerate(order or range(8)):
        out += nibbles[:, column::8].long() << 4 * place
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def int4(weight: torch.Tensor, group: int, scale: torch.dtype, symmetric: bool) -> Any:
    """codes [n, k], scales [n, g], zero points [n, g] and the dequantised matrix."""
    n, k = weight.shape
    groups = weight.view(n, k // group, group)
    low, high = groups.amin(2), groups.amax(2)
    if symmetric:
        scales = (groups.abs().amax(2) / 7.5).to(scale)
        zeros = torch.full_like(low, 8)
    else:
        scales = ((high.clamp(min=0) - low.clamp(max=0)) / 15).to(scale)
        zeros = (-low.clamp(max=0) / scales.float()).round().clamp(0, 15)
    wide = scales.float()[:, :, None]
    codes = ((groups / wide).round() + zeros[:, :, None]).clamp(0, 15)
    plain = (codes - zeros[:, :, None]) * wide
    return codes.view(n, k).int(), scales, zeros.int(), plain.view(n, k)


def compressed_int4(weight: torch.Tensor, symmetric: bool) -> Packed:
    codes, scales, zeros, plain = int4(weight, GROUP, torch.bfloat16, symmetric)
    found = {
        ".weight_packed": words(codes),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        found[".weight_zero_point"] = words(zeros.t()).t().contiguous()
    return found, plain


def gptq(weight: torch.Tensor, symmetric: bool, less: int) -> Packed:
    codes, scales, zeros, plain = int4(weight, GROUP, torch.float16, symmetric)
    return {
        ".qweight": words(codes).t().contiguous(),
        ".scales": scales.t().contiguous(),
        ".qzeros": words((zeros.t() - less) % 16),
        ".g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }, plain


def awq(weight: torch.Tensor) -> Packed:
    codes, scales, zeros, plain = int4(weight, GROUP, torch.float16, False)
    return {
        ".qweight": words(codes.t(), AWQ_ORDER),
        ".scales": scales.t().contiguous(),
        ".qzeros": words(zeros.t(), AWQ_ORDER),
    }, plain


def fp8(weight: torch.Tensor, rows: int, columns: int, name: str, scale: torch.dtype) -> Packed:
    n, k = weight.shape
    codes = torch.empty(n, k, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-n // rows), -(-k // columns), dtype=scale)
    plain = torch.empty(n, k)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j].float()).to(torch.float8_e4m3fn)
            plain[at] = codes[at].float() * scales[i, j].float()
    return {".weight": codes, name: scales}, plain


def nvfp4(weight: torch.Tensor, published: bool) -> Packed:
    """`published` by NVIDIA's tool, else by compressed-tensors, whose global scale divides."""
    n, k = weight.shape
    overall = weight.abs().max() / (6 * 448)
    blocks = weight.view(n, k // 16, 16)
    scales = (blocks.abs().amax(2) / 6 / overall).to(torch.float8_e4m3fn)
    if not published:
        overall = 1 / (1 / overall)
    step = (scales.float() * overall)[:, :, None]
    table = torch.tensor(E2M1 + [-value for value in E2M1])
    codes = ((blocks / step)[..., None] - table).abs().argmin(-1)
    plain = (table[codes] * step).view(n, k)
    codes = codes.view(n, k)
    raw = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if published:
        return {
            ".weight": raw, ".weight_scale": scales, ".weight_scale_2": overall,
            ".input_scale": torch.tensor(1.0),
        }, plain  # fmt: skip
    return {
        ".weight_packed": raw, ".weight_scale": scales,
        ".weight_global_scale": (1 / overall).view(1), ".input_global_scale": torch.ones(1),
    }, plain  # fmt: skip


def ct_config(form: str, **weights: Any) -> dict[str, Any]:
    usual = {"dynamic": False, "symmetric": True, "observer": "minmax", "actorder": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": usual | weights,
                "input_activations": None,
            }
        },
    }


GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
_INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
SCHEMES = {
    "fp8": Scheme(
        lambda w: fp8(w, 48, 32, ".weight_scale_inv", torch.float32),
        {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [48, 32], "modules_to_not_convert": ["lm_head"],
        },
    ),
    "compressed-fp8": Scheme(
        lambda w: fp8(w, 1, w.shape[1], ".weight_scale", torch.bfloat16),
        ct_config("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "compressed-int4": Scheme(
        lambda w: compressed_int4(w, True), ct_config("pack-quantized", **_INT), 0.5 + 2 / GROUP
    ),
    "compressed-int4-zeros": Scheme(
        lambda w: compressed_int4(w, False),
        ct_config("pack-quantized", **_INT | {"symmetric": False}),
        0.5 + 2.5 / GROUP,
    ),
    "gptq": Scheme(lambda w: gptq(w, True, 1), GPTQ_CONFIG | {"sym": True}),
    "gptq-zeros": Scheme(lambda w: gptq(w, False, 1), GPTQ_CONFIG | {"sym": False}),
    "gptq-v2": Scheme(
        lambda w: gptq(w, False, 0), GPTQ_CONFIG | {"sym": False, "checkpoint_format": "gptq_v2"}
    ),
    "awq": Scheme(
        awq,
        {
            "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": ["mlp.gate"],
        },
    ),
    "compressed-nvfp4": Scheme(
        lambda w: nvfp4(w, False),
        ct_config(
            "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16
        ),
    ),
    "modelopt-nvfp4": Scheme(
        lambda w: nvfp4(w, True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "producer": {}},
    ),
}  # fmt: skip


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks uint8 [n, k / 32, 16], scales uint8 [n, k / 32] and the dequantised [n, k]."""
    n, k = weight.shape
    groups = weight.view(n, k // 32, 32)
    exponent = groups.abs().amax(2).log2().floor() - 2
    step = (2**exponent)[..., None]
    table = torch.tensor(E2M1 + [-value for value in E2M1])
    codes = ((groups / step)[..., None] - table).abs().argmin(-1)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return blocks, (exponent + 127).to(torch.uint8), (table[codes] * step).view(n, k)


def make_gpt_oss(folder: Path) -> tuple[Path, Path]:
    """GPT-OSS as it is published and the same in bfloat16: dequantised experts lie [in, out]."""
    spec = families.TINY["gpt-oss"]
    spec = replace(spec, config=spec.config | {"hidden_size": 64, "sliding_window": 24})
    plain = families.make(folder / "plain", spec)
    weights = load_file(plain / "model.safetensors")
    quantised = dict(weights)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        done = [mxfp4(one.float().t().contiguous()) for one in quantised.pop(name)]
        quantised[f"{name}_blocks"] = torch.stack([blocks for blocks, *_ in done])
        quantised[f"{name}_scales"] = torch.stack([scales for _, scales, _ in done])
        turned = torch.stack([found.t() for *_, found in done])
        weights[name] = turned.to(torch.bfloat16).contiguous()
        assert torch.equal(weights[name].float(), turned)
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "*.self_attn.*"]}
    return write(folder / "quantised", plain, quantised, config), plain


def make_deepseek(folder: Path) -> tuple[Path, Path]:
    """DeepSeek-V3 as it is published, with smaller blocks, and the same in float32."""
    plain = families.make(folder / "plain", families.TINY["deepseek-v3"])
    weights = load_file(plain / "model.safetensors")
    quantised, dense = pack(iter(weights.items()), SCHEMES["fp8"])
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    return write(folder / "quantised", plain, quantised, SCHEMES["fp8"].config), plain


def write(folder: Path, plain: Path, weights: Tensors, quantization: dict[str, Any]) -> Path:
    """The checkpoint `plain` with other tensors and their description."""
    folder.mkdir(parents=True)
    for file in plain.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    tiny.dump(folder / "config.json", config | {"quantization_config": quantization})
    return folder


def is_linear(name: str) -> bool:
    """Whether tools quantise it: projections, not the router, embeddings or the head."""
    return name.endswith(("_proj.weight", "_with_mqa.weight"))


def pack(plain: Iterator[tuple[str, torch.Tensor]], scheme: Scheme) -> tuple[Tensors, Tensors]:
    """The checkpoint's tensors with every projection quantised, and the same dequantised."""
    quantised: Tensors = {}
    dense: Tensors = {}
    for name, tensor in plain:
        if is_linear(name):
            found, dense[name] = scheme.pack(tensor.float())
            module = name.removesuffix(".weight")
            quantised.update({module + end: one.contiguous() for end, one in found.items()})
        else:
            quantised[name] = dense[name] = tensor
    return quantised, dense


def make(folder: Path, scheme: Scheme) -> tuple[Path, Path]:
    """Write both checkpoints: the quantised one and the plain one."""
    quantised, dense = pack(tiny.tensors(SPEC), scheme)
    config = tiny.config(SPEC)
    plain = folder / "plain"
    plain.mkdir(parents=True)
    vocabulary.write(plain, vocabulary.build(), max_length=SPEC.context)
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    tiny.dump(plain / "config.json", config)
    return write(folder / "quantised", plain, quantised, scheme.config), plain
