"""Reads a checkpoint's config.json so that no key is overlooked.

Owns: the rule that every key is read, required to have one value, or listed as ignored; an
unknown key is an error that names it, because a flag we do not know would mean wrong text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moestro.errors import ModelError

# Said by every family's config, meaning nothing for inference with this engine.
HARMLESS = frozenset(
    {
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "experts_implementation",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "prefix",
        "problem_type",
        "pruned_heads",
        "resid_pdrop",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "sep_token_id",
        "task_specific_params",
        "tie_encoder_decoder",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unk_token_id",
        "use_bfloat16",
        "use_cache",
    }
)

DTYPES = ("float32", "bfloat16", "float16")


class HFConfig:
    """One config.json. Ask for every key, then call `done`."""

    def __init__(self, raw: dict[str, Any], prefix: str = "") -> None:
        self._raw = raw
        self._prefix = prefix  # of every key in errors
        self._seen: set[str] = set()
        self._parts: list[HFConfig] = []

    @property
    def prefix(self) -> str:
        """What stands before every key in errors: the keys of the objects around this one."""
        return self._prefix

    def part(self, key: str) -> HFConfig:
        """The object under `key`, whose keys are asked for like these; empty when absent."""
        value = self.get(key, {})
        if not isinstance(value, dict):
            raise ModelError(f"config.json: {self._prefix}{key} must be an object, is {value!r}")
        part = HFConfig(value, f"{self._prefix}{key}.")
        self._parts.append(part)
        return part

    def get(self, key: str, default: Any = None) -> Any:
        """Value of `key`; null counts as absent."""
        self._seen.add(key)
        value = self._raw.get(key)
        return default if value is None else value

    def is_null(self, key: str) -> bool:
        """`key` is there and null, where that says something else than leaving it out."""
        self._seen.add(key)
        return key in self._raw and self._raw[key] is None

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` on; without a default the key must be there."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "positive whole number" if least == 1 else f"whole number from {least} on"
            raise ModelError(f"config.json: {self._prefix}{key} must be a {kind}, is {value!r}")
        return value

    def experts(self, default: int, *own: str) -> int:
        """Number of experts: transformers 5 writes any of these names."""
        names = (*own, "num_experts", "num_local_experts")
        named = [key for key in names if self.get(key) is not None]
        counts = {self.number(key) for key in named} or {default}
        if len(counts) > 1:
            raise ModelError(f"config.json: {self._prefix}{' and '.join(named)} differ: {counts}")
        return counts.pop()

    def real(self, key: str, default: float) -> float:
        """A positive finite number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            raise ModelError(
                f"config.json: {self._prefix}{key} must be a positive number, is {value!r}"
            )
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ModelError(
                f"config.json: {self._prefix}{key} must be true or false, is {value!r}"
            )
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Refuse the model unless `key` is absent, null or one of `allowed`."""
        value = self.get(key)
        if value is not None and value not in allowed:
            served = " or ".join(repr(a) for a in allowed) or "nothing"
            raise ModelError(
                f"config.json: {self._prefix}{key} is {value!r}, and only {served} is served"
            )

    def require_all(self, key: str, *allowed: Any) -> None:
        """Refuse the model unless every entry of the list `key` is one of `allowed`, or it is
        absent."""
        for value in self.get(key, []):
            if value not in allowed:
                served = " or ".join(repr(a) for a in allowed)
                raise ModelError(
                    f"config.json: {self._prefix}{key} has {value!r}; only {served} is served"
                )

    def ignore(self, *keys: str) -> None:
        """These keys may be there and change nothing."""
        self._seen.update(keys)

    def dtype(self) -> str:
        """The checkpoint's dtype; float32 when the config does not say."""
        value = str(self._raw.get("dtype") or self._raw.get("torch_dtype") or "float32")
        name = value.removeprefix("torch.")
        if name not in DTYPES:
            raise ModelError(
                f"config.json: {self._prefix}dtype {name!r} is not served, only {', '.join(DTYPES)}"
            )
        return name

    def done(self) -> None:
        """Raise if the config has a key nobody asked for."""
        for part in self._parts:
            part.done()
        unknown = sorted(self._prefix + key for key in set(self._raw) - self._seen - HARMLESS)
        if unknown:
            raise ModelError(
                f"config.json: unknown keys {', '.join(unknown)}; serving this model without "
                "knowing what they mean could give wrong text"
            )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ModelError when it is missing or damaged."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{path.name} must hold a JSON object")
    return raw
