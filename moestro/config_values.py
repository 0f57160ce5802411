"""The kinds of value that settings have, and how text becomes one.

Owns: sizes, counts, names, JSON objects and web origins, each with what is refused, and how a
setting and its value are shown. Does not own: the settings themselves (`config`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

ENV_PREFIX = "MOESTRO_"  # of environment variables that set something

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?)(?P<binary>i?)(?P<byte>b?)", re.I)
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(value: object) -> object:
    """Bytes from `24GiB`, `24GB`, `1.5g` or a plain number.

    `GB` is 10^9 bytes; `GiB` and a bare `G` are 2^30. Letters may be of either case. Anything
    that is not text is handed back for pydantic to judge. Raises ValueError.
    """
    if isinstance(value, bool):
        raise ValueError("a number of bytes, or text such as 24GiB")
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None or (match["binary"] and not match["unit"]):
        raise ValueError("a number of bytes, or a number with a unit (KiB to TiB, KB to TB)")
    decimal = bool(match["byte"]) and not match["binary"]
    scale = (1000 if decimal else 1024) ** _POWER[match["unit"].lower()]
    return int(Decimal(match["number"]) * scale)


def _automatic(value: object) -> object:
    return None if isinstance(value, str) and value.strip().lower() == "auto" else value


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def parse_object(value: object) -> object:
    """A JSON object from its text; what is no text is pydantic's to judge. Raises ValueError."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise ValueError('a JSON object, such as {"enable_thinking": false}')
    return parsed


def check_origins(values: tuple[str, ...]) -> tuple[str, ...]:
    """`values` when each is `*` or an origin as browsers send it. Raises ValueError."""
    for value in values:
        if value != "*" and not _is_origin(value):
            raise ValueError("* or scheme://host[:port] without a path, such as https://a.example")
    return values


def _is_origin(value: str) -> bool:
    try:
        parts = urlsplit(value)
        _ = parts.port  # raises when it is none
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname) and value == f"{parts.scheme}://{parts.netloc}"


Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
AutoSize = Annotated[Size | None, BeforeValidator(_automatic)]
AutoCount = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_automatic)]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_several)]
JsonObject = Annotated[dict[str, Any] | None, BeforeValidator(parse_object)]
Origins = Annotated[Names, AfterValidator(check_origins)]


def spelled(name: str, source: Mapping[str, str]) -> str:
    """A setting as people wrote it; `source` says of each where it came from."""
    origin = source.get(name, "")
    forms = {
        "command line": "--" + name.replace("_", "-"),
        "environment": ENV_PREFIX + name.upper(),
    }
    return forms.get(origin, f"{name} in {origin}" if origin else name)


def shortened(value: Any) -> str:
    """A value as Python shows it, at most 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
