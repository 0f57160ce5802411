"""Fields that are known but not served: refused by name, so that nothing is silently ignored.

Owns: the two tables (refused, ignorable) and the once-per-key warning about unknown fields.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from moestro.errors import InvalidRequest

log = logging.getLogger(__name__)

# field -> (values that ask for nothing, what a refusal says)
Refused = Mapping[str, tuple[tuple[Any, ...], str]]

TOOLS = "tools belong to /v1/chat/completions"
OLD_TOOLS = "use tools and tool_choice"
REASONING = "reasoning is told apart on /v1/chat/completions"

REFUSED: Refused = {
    "tools": (([],), TOOLS),
    "functions": (([],), OLD_TOOLS),
    "tool_choice": (("none", "auto"), TOOLS),
    "function_call": (("none", "auto"), OLD_TOOLS),
    "structural_tag": ((), "use response_format, or tools with strict"),
    "guided_whitespace_pattern": ((), "white space between JSON tokens is bounded as it is"),
    "suffix": (("",), "fill-in-the-middle is not available in this version"),
    "use_beam_search": ((False,), "beam search is not available"),
    "beam_width": ((1,), "beam search is not available"),
    "length_penalty": ((1, 1.0), "it belongs to beam search, which is not available"),
    "logprob_token_ids": (([],), "log-probabilities of chosen ids are not available"),
    "prompt_logprobs": ((), "use echo with logprobs on /v1/completions"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": (([],), "use logit_bias"),
    "chat_template": (("",), "a request cannot bring its own template"),
    "truncate_prompt_tokens": ((), "shorten the prompt before sending it"),
    "truncation_side": ((), "shorten the prompt before sending it"),
    "documents": (([],), "put their text into a message"),
    "prompt_embeds": ((), "embeddings cannot be sent as a prompt"),
    "input_ids": ((), "send token ids as the prompt of /v1/completions"),
    "audio": ((), "this server answers with text only"),
    "thinking_token_budget": ((), "a budget for reasoning is not available in this version"),
    "include_reasoning": ((True,), REASONING),
    "separate_reasoning": ((False,), REASONING),
    "stream_reasoning": ((True, False), REASONING),
    "stream_interval": ((1,), "every batch of tokens is sent at once"),
    "return_prompt_token_ids": ((False,), "use return_token_ids"),
    "no_stop_trim": ((False,), "use include_stop_str_in_output"),
}
REFUSED_CHAT: Refused = {
    **REFUSED,
    "echo": ((False,), "echo belongs to /v1/completions"),
    "best_of": ((), "best_of is not available"),
}
GUIDED = "guided_"

# Hints for services around a model: they change nothing about the answer.
IGNORABLE = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "prediction",
        "verbosity",
        "web_search_options",
        "moderation",
        "parallel_tool_calls",
        "guided_decoding_backend",
        "vllm_xargs",
        "kv_transfer_params",
        "session_id",
    }
)
MAX_WARNED = 256


class UnknownKeys:
    """Warns once for each unknown field. Bounded, because clients choose the names."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, key: str) -> None:
        """Log a warning the first time `key` is seen."""
        if key in self._seen or len(self._seen) >= MAX_WARNED:
            return
        self._seen.add(key)
        shown = key if len(key) <= 64 and key.isidentifier() else "(not a plain name)"
        log.warning("ignoring an unknown request field: %s", shown)


def check_extra(extra: Mapping[str, Any], refused: Refused, unknown: UnknownKeys) -> None:
    """Raise `InvalidRequest` for the first known field that asks for what is not served."""
    for key, value in extra.items():
        if value is None:
            continue
        if key in refused:
            harmless, reason = refused[key]
            if not any(type(value) is type(h) and value == h for h in harmless):
                raise InvalidRequest(f"'{key}' is not supported: {reason}.", param=key)
        elif key.startswith(GUIDED) and key not in IGNORABLE:
            raise InvalidRequest(f"'{key[:64]}' is not supported.", param=key[:64])
        elif key == "modalities":
            if value != ["text"]:
                raise InvalidRequest("'modalities' may only be ['text'].", param=key)
        elif key not in IGNORABLE:
            unknown.note(key)


def check_best_of(extra: Mapping[str, Any], n: int) -> None:
    """Raise `InvalidRequest` unless `best_of` equals `n`: choosing among more is not offered."""
    best_of = extra.get("best_of")
    if best_of is not None and (isinstance(best_of, bool) or best_of != n):
        raise InvalidRequest(f"'best_of' must equal n, which is {n}.", param="best_of")
