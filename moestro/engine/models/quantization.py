"""What config.json says of quantised weights.

Owns: which ways of quantising are served, with every option of theirs read, checked or listed as
ignored. Does not own: the names and shapes of the tensors (`engine.quantized`). Activations are
never quantised here: what a config says of theirs only tells other engines what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from moestro.engine.models.hf_config import HFConfig, read_json
from moestro.errors import ModelError
from moestro.kernels import formats
from moestro.kernels.formats import Format


class Scheme(Enum):
    """How a checkpoint's tensors spell a quantised matrix."""

    FP8 = "fp8"  # DeepSeek-V3, Qwen3-FP8
    MXFP4 = "mxfp4"  # GPT-OSS
    CT_FP8 = "compressed-tensors float-quantized"
    CT_INT4 = "compressed-tensors pack-quantized"
    CT_NVFP4 = "compressed-tensors nvfp4-pack-quantized"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    AWQ = "awq"
    MODELOPT_NVFP4 = "modelopt NVFP4"


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the weights of a checkpoint are quantised. Those that are not are stored plainly."""

    scheme: Scheme
    format: Format  # the dtype of its scales is a guess until the tensors were seen
    ignored: tuple[str, ...] = ()  # modules said not to be quantised: names or patterns

    def ignores(self, module: str) -> bool:
        """Whether the config says that `module` is stored plainly."""
        return any(
            re.match(pattern[3:], module) is not None
            if pattern.startswith("re:")
            else fnmatchcase(module, pattern)
            for pattern in self.ignored
        )


def read_quantization(config: HFConfig, folder: Path) -> Quantization | None:
    """What `quantization_config` of config.json says, or hf_quant_config.json of older ModelOpt
    checkpoints; None when the weights are not quantised. ModelError names what is not served."""
    if config.get("quantization_config") is None:
        return _beside(folder / _MODELOPT_FILE)
    part = config.part("quantization_config")
    method = part.get("quant_method")
    if method not in _READERS:
        served = ", ".join(_READERS)
        raise ModelError(
            f"config.json: {part.prefix}quant_method {method!r} is not served; served are {served}"
        )
    return _READERS[method](part)


def _beside(path: Path) -> Quantization | None:
    if not path.exists():
        return None
    file = HFConfig(read_json(path))
    file.ignore("producer")
    quantization = _modelopt(file.part("quantization"))
    file.done()
    return quantization


def _fp8(part: HFConfig) -> Quantization:
    part.require("activation_scheme", "dynamic")
    part.require("fmt", "e4m3")
    part.require("scale_fmt", "float", "ue8m0")
    part.require("expert_dtype", "fp8")
    part.require("modules_to_convert")
    part.ignore("dequantize")
    block = part.get("weight_block_size")
    if not _is_block(block):
        raise ModelError(
            f"config.json: {part.prefix}weight_block_size must be two positive whole numbers, "
            f"is {block!r}"
        )
    return Quantization(Scheme.FP8, formats.fp8(block[0], block[1], "float32"), _ignored(part))


def _mxfp4(part: HFConfig) -> Quantization:
    part.ignore("dequantize")
    return Quantization(Scheme.MXFP4, formats.MXFP4, _ignored(part))


def _gptq(part: HFConfig) -> Quantization:
    if part.flag("desc_act", False):
        raise ModelError(
            f"config.json: {part.prefix}desc_act is true; GPTQ weights in order of activation "
            "(act-order) are not served"
        )
    part.require("bits", 4)
    part.require("lm_head", False)
    part.require("is_marlin_format", False)
    part.require("pack_dtype", "int32")
    part.ignore(*_GPTQ_IGNORED)
    named = part.get("checkpoint_format") or part.get("format") or "gptq"
    part.require("checkpoint_format", "gptq", "gptq_v2")
    part.require("format", "gptq", "gptq_v2")
    rules = part.get("dynamic", {})
    if not isinstance(rules, dict) or any(not str(rule).startswith("-:") for rule in rules):
        raise ModelError(
            f"config.json: {part.prefix}dynamic gives modules options of their own, which is not "
            "served"
        )
    form = formats.int4(_group(part), "float16", zeros=not part.flag("sym", True))
    scheme = Scheme.GPTQ_V2 if named == "gptq_v2" else Scheme.GPTQ
    return Quantization(scheme, form, tuple(f"re:{str(rule)[2:]}" for rule in rules))


def _awq(part: HFConfig) -> Quantization:
    part.require("bits", 4)
    part.require("zero_point", True)
    part.require("version", "gemm", "GEMM")
    part.require("format", "gemm")
    part.ignore(*_GPTQ_IGNORED, "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "sym", "desc_act")
    form = formats.int4(_group(part), "float16", zeros=True)
    # A name stands for every module on whose path it is.
    path = ("{}", "*.{}", "{}.*", "*.{}.*")
    ignored = tuple(pattern.format(name) for name in _ignored(part) for pattern in path)
    return Quantization(Scheme.AWQ, form, ignored)


def _modelopt(part: HFConfig) -> Quantization:
    part.require("quant_algo", "NVFP4")
    if part.get("quant_algo") is None:
        raise ModelError(f"config.json: {part.prefix}quant_algo is missing")
    part.require("group_size", 16)
    part.ignore("producer", "config_groups", "kv_cache_scheme", "kv_cache_quant_algo")
    ignored = _strings(part, "ignore") + _strings(part, "exclude_modules")
    return Quantization(Scheme.MODELOPT_NVFP4, formats.NVFP4, ignored)


def _compressed_tensors(part: HFConfig) -> Quantization:
    part.require("quantization_status", "compressed", "frozen")
    for rotation in ("transform_config", "sparsity_config"):
        if part.get(rotation, {}) not in ({}, {"format": "dense"}):
            raise ModelError(f"config.json: {part.prefix}{rotation} is not served")
    part.ignore(
        "kv_cache_scheme", "global_compression_ratio", "version", "run_compressed", "dequantize"
    )
    groups = part.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelError(f"config.json: {part.prefix}config_groups is missing")
    ignored = _strings(part, "ignore")
    found = {_ct_group(part, name, group, ignored) for name, group in groups.items()}
    if len(found) > 1:
        raise ModelError(
            f"config.json: {part.prefix}config_groups quantises weights in {len(found)} ways; only "
            "one is served"
        )
    return found.pop()


def _ct_group(part: HFConfig, name: str, raw: Any, ignored: tuple[str, ...]) -> Quantization:
    where = f"{part.prefix}config_groups.{name}."
    group = HFConfig(raw if isinstance(raw, dict) else {}, where)
    group.ignore("targets", "input_activations", "output_activations")
    weights = group.part("weights")
    weights.require("dynamic", False)
    weights.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    kind = group.get("format") or part.get("format")
    bits, strategy = weights.get("num_bits"), weights.get("strategy")
    size, block = weights.get("group_size"), weights.get("block_structure")
    symmetric = weights.flag("symmetric", True)
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise ModelError(
            f"config.json: {where}weights.actorder {weights.get('actorder')!r} (act-order) is not "
            "served"
        )
    weights.require("type", "float" if kind in ("float-quantized", _NVFP4) else "int")
    group.done()
    match kind, bits, strategy:
        case "pack-quantized", 4, "group" if isinstance(size, int) and size > 0:
            form = formats.int4(size, "bfloat16", zeros=not symmetric)
            return Quantization(Scheme.CT_INT4, form, ignored)
        case "pack-quantized", 4, "channel":
            form = formats.int4(0, "bfloat16", zeros=not symmetric)
            return Quantization(Scheme.CT_INT4, form, ignored)
        case "float-quantized", 8, "channel":
            return Quantization(Scheme.CT_FP8, formats.fp8(1, 0, "bfloat16"), ignored)
        case "float-quantized", 8, "tensor":
            return Quantization(Scheme.CT_FP8, formats.fp8(0, 0, "bfloat16"), ignored)
        case "float-quantized", 8, "block" if _is_block(block):
            form = formats.fp8(block[0], block[1], "bfloat16")
            return Quantization(Scheme.CT_FP8, form, ignored)
        case "nvfp4-pack-quantized", 4, "tensor_group" if size == 16:
            return Quantization(Scheme.CT_NVFP4, formats.NVFP4, ignored)
    raise ModelError(
        f"config.json: {where}: format {kind!r} with {bits} bits, strategy {strategy!r} and "
        f"group_size {size!r} is not served"
    )


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
    )


def _group(part: HFConfig) -> int:
    """Columns that share a scale; 0 for all of them, which is -1 in config.json."""
    return 0 if part.get("group_size") == -1 else part.number("group_size", 128)


def _ignored(part: HFConfig) -> tuple[str, ...]:
    return _strings(part, "modules_to_not_convert") + _strings(part, "ignored_layers")


def _strings(part: HFConfig, key: str) -> tuple[str, ...]:
    value = part.get(key, [])
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ModelError(f"config.json: {part.prefix}{key} must be a list of names, is {value!r}")
    return tuple(value)


_MODELOPT_FILE = "hf_quant_config.json"
_NVFP4 = "nvfp4-pack-quantized"
_READERS: dict[Any, Callable[[HFConfig], Quantization]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "modelopt": _modelopt,
}
# How the weights came to be, or which kernels others should use.
_GPTQ_IGNORED = (
    "act_group_aware",
    "backend",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "disable_exllama",
    "exllama_config",
    "max_input_length",
    "meta",
    "model_file_base_name",
    "model_name_or_path",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "pad_token_id",
    "static_groups",
    "tokenizer",
    "true_sequential",
    "use_cuda_fp16",
    "use_exllama",
)
