"""Writing grammars in llguidance's Lark dialect. Owns: how texts, schemas and markers are spelled.

A rule has a lower-case name, a terminal an upper-case one. A marker that is a special token is no
text for the model: it is spelled by its id.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

SpecialId = Callable[[str], int | None]  # the id of a special token; None for any other text

TEXT = "TEXT"  # any text at all


class Lark:
    """A grammar under construction. The rule `start` is the whole."""

    def __init__(self, special: SpecialId) -> None:
        self._special = special
        self._lines = ["%llguidance {}", f"{TEXT}: /(?s:.*)/"]
        self._names = 0

    def rule(self, body: str, name: str = "", options: str = "") -> str:
        """Add a rule and return its name. `options` are those of llguidance, such as `lazy`."""
        if not name:
            self._names += 1
            name = f"r{self._names}"
        self._lines.append(f"{name}{f'[{options}]' if options else ''}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """Add a terminal and return its name."""
        self._names += 1
        return self.rule(body, f"T{self._names}")

    def json(self, schema: str) -> str:
        """Return the name of a rule for what matches a JSON schema."""
        return self.rule(f"%json {schema}")

    def marker(self, word: str) -> str:
        """Return what matches a marker."""
        token = self._special(word)
        return quoted(word) if token is None else f"<[{token}]>"

    def up_to(self, word: str) -> str:
        """Return what matches any text and the first marker behind it."""
        token = self._special(word)
        if token is not None:
            return f"{TEXT} <[{token}]>"
        return self.rule(f"{TEXT} {quoted(word)}", options="lazy")

    def any_of(self, bodies: Iterable[str]) -> str:
        """Return what matches one of several."""
        return f"({' | '.join(bodies)})"

    def text(self, start: str) -> str:
        """Return the grammar, whose `start` is this body."""
        return "\n".join([*self._lines, f"start: {start}", ""])


def quoted(text: str) -> str:
    """Return what matches exactly this text."""
    return json.dumps(text, ensure_ascii=False)
