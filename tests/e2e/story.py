"""What the scripted server can say, by name. Every piece is one token and is said once only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.oracle import scripted
from tests.oracle.scripted import Chain

CHAINS = {
    "letters": Chain((b"ABC", b"DEF", b"G", b"HI", b"J")),
    "lines": Chain((b"a\n", b"\nb")),
    "turn": Chain((b"said ", b"<|", b"im_", b"end", b"|>", b"after")),
    "tag": Chain((b"ok ", b"<", b"E", b"N", b"D", b">", b" more")),
    "overlap": Chain((b"aa", b"ab", b" z")),
    "emoji": Chain((b"x \xf0\x9f", b"\x98\x80", b" y")),
    "cut": Chain((b"\xf0\x9f\x99", b"\x82")),
    "invalid": Chain((b"\xff", b"\xfe", b"\xc3", b"(")),
    "replacement": Chain((b"before \xef\xbf\xbd", b" behind")),
    "separators": Chain((b"one\xe2\x80\xa8two", b"\xc2\x85", b"\x00three")),
    "alphabet": Chain(tuple(b" %c" % letter for letter in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"), "loop"),
}


class Story:
    """A scripted checkpoint, with prompts by chain name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = scripted.make(folder, list(CHAINS.values()))

    def prompt(self, name: str, *, length: int = 1) -> list[int]:
        """Token ids that the chain called `name` answers."""
        return self.script.prompt(list(CHAINS).index(name), length=length)

    def completion(self, name: str, *, length: int = 1, **options: Any) -> dict[str, Any]:
        """Body of a plain completion that the chain answers."""
        prompt = self.prompt(name, length=length)
        return {"prompt": prompt, "max_tokens": 50, "temperature": 0} | options

    def chat(self, name: str, **options: Any) -> dict[str, Any]:
        """Body of a chat that the chain answers."""
        content = scripted.start(list(CHAINS).index(name))
        messages = [{"role": "user", "content": content}]
        return {"messages": messages, "max_tokens": 50, "temperature": 0} | options

    def token(self, piece: bytes) -> int:
        """Id of a piece."""
        return self.script.vocabulary.id(piece)

    def said(self, name: str, tokens: int) -> str:
        """Text of the first `tokens` tokens of a chain, which may loop."""
        pieces = CHAINS[name].pieces
        rounds = -(-tokens // len(pieces))
        return b"".join((pieces * rounds)[:tokens]).decode("utf-8", errors="replace")
