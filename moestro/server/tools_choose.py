"""Which parsers a model's answers need. Owns: the tables of parsers and the choice among them.

The chat template decides: what it writes for calls in a history is what the model was trained on.
The model type is asked only where there is no template that says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from moestro.server import tools_families as families
from moestro.server import tools_xml as xml
from moestro.server.reasoning import MISTRAL, THINK, Marks
from moestro.server.tools_families import Schemas
from moestro.server.tools_harmony import CHANNEL, MESSAGE
from moestro.server.tools_harmony import MARKERS as HARMONY_MARKERS
from moestro.server.tools_reader import Script

NONE, AUTO, HARMONY = "none", "auto", "harmony"

# name -> (script, markers that may be special tokens)
TOOL_PARSERS: Mapping[str, tuple[Callable[[Schemas], Script], tuple[str, ...]]] = {
    "hermes": (families.hermes, (families.TOOL_CALL, families.TOOL_CALL_END)),
    "qwen3_coder": (xml.qwen3_coder, (families.TOOL_CALL, families.TOOL_CALL_END)),
    "mistral": (families.mistral, (families.TOOL_CALLS, families.ARGS, families.CALL_ID)),
    "deepseek": (
        families.deepseek,
        (
            *(families.CALLS_BEGIN, families.CALLS_END, families.SEP),
            *(families.CALL_BEGIN, families.CALL_END),
        ),
    ),
}
MARKS: Mapping[str, Marks] = {"think": THINK, "mistral": MISTRAL}

# parser -> texts that all stand in a template of that family; the first match wins
TOOL_SIGNS: Mapping[str, tuple[str, ...]] = {
    HARMONY: (CHANNEL, MESSAGE),
    "deepseek": (families.CALL_BEGIN,),
    "mistral": (families.TOOL_CALLS,),
    "qwen3_coder": (families.TOOL_CALL, xml.FUNCTION),
    NONE: ("<arg_key>",),  # GLM: <tool_call>, but nothing that is read here
    "hermes": (families.TOOL_CALL,),
}
REASONING_SIGNS: Mapping[str, tuple[str, ...]] = {
    HARMONY: (CHANNEL, MESSAGE),
    "mistral": (MISTRAL.open,),
    "think": (THINK.close,),
}
TYPES: Mapping[str, str] = {
    "gpt_oss": HARMONY,
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "mistral": "mistral",
    "mixtral": "mistral",
    "qwen2_moe": "hermes",
    "qwen3_moe": "hermes",
}


def markers_of(tools: str, reasoning: str) -> frozenset[str]:
    """Return the markers that the named parsers look for."""
    if HARMONY in (tools, reasoning):
        return frozenset(HARMONY_MARKERS)
    found: tuple[str, ...] = TOOL_PARSERS[tools][1] if tools in TOOL_PARSERS else ()
    marks = MARKS.get(reasoning)
    return frozenset((*found, marks.open, marks.close) if marks is not None else found)


def tool_parser(asked: str, template: str, model_type: str) -> str:
    """Return the name of the tool parser, `none` when there is none."""
    if asked != AUTO:
        return asked
    return _signed(TOOL_SIGNS, template) or TYPES.get(model_type, NONE)


def reasoning_parser(asked: str, template: str, model_type: str) -> str:
    """Return the name of the reasoning parser, `none` when there is none."""
    if asked != AUTO:
        return asked
    typed = HARMONY if TYPES.get(model_type) == HARMONY else NONE
    return _signed(REASONING_SIGNS, template) or typed


def _signed(signs: Mapping[str, tuple[str, ...]], template: str) -> str | None:
    for name, texts in signs.items():
        if all(text in template for text in texts):
            return name
    return None


def model_type(folder: Path) -> str:
    """Return what a checkpoint's config.json calls its family; nothing when it does not say."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    kind = found.get("model_type") if isinstance(found, dict) else None
    return kind if isinstance(kind, str) else ""
