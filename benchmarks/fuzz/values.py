"""Values that servers tend to trip over, and where to put them in a body that is otherwise right.

Owns: small valid bodies made from a JSON schema, and their mutations.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

# What a field of this name holds in a small valid body, whichever route has it.
EXAMPLES: dict[str, Any] = {
    "model": None,
    "messages": [{"role": "user", "content": "x"}],
    "prompt": "x",
    "input": "x",
    "tokens": [40, 41],
    "max_tokens": 3,
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
}
# Set in every body that has them, so that no request runs for long.
SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens")
CAP = {"max_tokens": 3}

NASTY: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**63, -(2**63), 2**64, 1e308, 1e-308, 0.5, -0.0, "",
    "x", " ", "\x00", "null", "true", "1", "a" * 5000, "\ud800", "😀" * 50, "\u2028", [], {}, [[]],
    [{}], [None], {"": None}, {"x": {"y": {"z": []}}}, ["x"] * 40, [0] * 300, {"role": "user"},
    [1, "x", None, {}], {"type": "text"}, [{"type": "text", "text": "x"}],
    [{"type": "image_url", "image_url": {"url": "x"}}], [-1], [10**9], ["", "x"], {"1": 5},
    {"-1": 5}, {"99999999": 5}, {"x": 1}, {"type": "json_object"}, {"type": "function"}, "auto",
    "required", {"include_usage": True}, {"include_usage": "x"}, "system", "tool", "assistant",
    "developer", "<|im_end|>",
)  # fmt: skip
FIELDS = (
    "input_file_id", "endpoint", "completion_window", "file", "purpose", "id", "after", "limit",
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stream",
    "stream_options", "logprobs", "top_logprobs", "logit_bias", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "tools", "tool_choice", "parallel_tool_calls",
    "response_format", "echo", "min_tokens", "ignore_eos", "stop_token_ids", "messages", "prompt",
    "input", "chat_template_kwargs", "reasoning_effort", "cache_salt", "request_id", "priority",
    "suffix", "best_of", "user", "metadata", "guided_regex", "structured_outputs", "system",
    "instructions", "tokens", "add_generation_prompt", "continue_final_message",
    "skip_special_tokens", "include_stop_str_in_output", "text", "thinking", "reasoning",
    "previous_response_id", "store", "truncation", "stop_sequences", "extra_body", "\x00",
)  # fmt: skip
TEXTS = (
    "\u0000", "\ufeff", "\u202e", "\u2028\u2029", "😀", "\U0001f469\u200d\U0001f467", "\ud7ff",
    "\uffff", "\U0010ffff", "a\u0300" * 200, "<|im_end|>", "<|im_start|>system\n", "<think>",
    "</think>", "<tool_call>", "</tool_call>{", "[TOOL_CALLS]", "{{ 7 * 7 }}",
    "{% for i in range(9**9) %}", "%s%n", "\r\n\r\n", "data: [DONE]\n\n", "'; DROP TABLE x;--",
    "../../etc/passwd", "x" * 200, "\t\n\x0b\x0c", "\u0130\u0131\u017f\u212a", "ﷺ" * 50,
    "<s></s><unk><pad>", "\\ud800",
)  # fmt: skip


def example(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """A small body for a schema: what it requires, what can be said shortly, and a short answer."""
    properties = schema.get("properties", {})
    wanted = dict.fromkeys(schema.get("required", []))
    if not wanted:  # some routes take one of several fields and so require none
        wanted = dict.fromkeys(name for name in ("prompt", "input") if name in properties)
    body = {name: EXAMPLES.get(name, _value(properties.get(name, {}))) for name in wanted}
    body |= {name: EXAMPLES[name] for name in SHORT if name in properties}
    if "max_tokens" in body and "max_completion_tokens" in body:
        del body["max_completion_tokens"]
    return copy.deepcopy(body)


def _value(schema: dict[str, Any]) -> Any:
    """Something of the schema's type."""
    options = [schema, *schema.get("anyOf", []), *schema.get("oneOf", [])]
    kind = next((option["type"] for option in options if "type" in option), "string")
    if isinstance(schema.get("enum"), list):
        return schema["enum"][0]
    values = {"string": "x", "integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}
    return values.get(kind)


def mutated(body: dict[str, Any], dice: random.Random) -> Any:
    """The body with one to three values replaced, removed or added, anywhere in it."""
    made = copy.deepcopy(body)
    for _ in range(dice.choice((1, 1, 2, 3))):
        places = list(_places(made))
        if dice.random() < 0.4 or not places:
            made[dice.choice(FIELDS)] = copy.deepcopy(dice.choice(NASTY))
            continue
        holder, key = dice.choice(places)
        if dice.random() < 0.15:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(dice.choice(NASTY))
    return made


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in list(keys):
        yield value, key
        yield from _places(value[key])
