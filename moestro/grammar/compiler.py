"""From a grammar's text to a matcher.

Owns: the limits, the library's calls and its words when a grammar is wrong, and the grammars that
were compiled lately. Does not own: time, which the library cannot be told to heed (`grammar.trial`
can, for what comes from outside).
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict

from llguidance import LLMatcher, LLParserLimits

from moestro.errors import GrammarError
from moestro.grammar.matcher import Matcher
from moestro.grammar.vocabulary import Tokens, Vocabulary
from moestro.types import Grammar

MOST_BYTES = 128 << 10  # of a grammar's text; compiling takes time with its square
MOST_KEPT = 64  # compiled grammars, a few MiB each at most
SPACES = r"[\x20\x0A\x0D\x09]{1,64}"  # between two parts of a JSON text
MOST_WORDS = 300  # characters of the library's message


def check_size(grammar: Grammar) -> None:
    """Raise GrammarError when the text alone is too much."""
    size = len(grammar.text.encode("utf-8", "surrogatepass"))
    if size > MOST_BYTES:
        raise GrammarError(
            f"The grammar has {size} bytes; at most {MOST_BYTES} are compiled.",
        )


def compile_grammar(grammar: Grammar, tokens: Tokens) -> LLMatcher:
    """A matcher at its start; GrammarError with the library's words when there can be none.

    The library's own limits on states and items hold from here on, in every step of the matcher.
    """
    check_size(grammar)
    try:
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(tokens.library, _source(grammar), log_level=0, limits=limits)
    except ValueError as error:  # JSON that is none
        raise GrammarError(words_of(grammar, str(error))) from None
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first mask; much is computed only when it is needed
    if matcher.is_error():
        raise GrammarError(words_of(grammar, matcher.get_error()))
    return matcher


class Compiler:
    """Compiles for one vocabulary, from any thread. Keeps the last `MOST_KEPT` results."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher of its own for one sequence; GrammarError when the grammar cannot be used."""
        tokens = self._vocabulary.tokens
        with self._lock:  # also while compiling: choices of one request want the same grammar
            compiled = self._kept.get(grammar)
            if compiled is None:
                compiled = self._kept[grammar] = compile_grammar(grammar, tokens)
                if len(self._kept) > MOST_KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(grammar)
            return Matcher(compiled.deep_copy(), tokens)


def _source(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_schema":
            # Keywords that it does not know are an error, whatever the schema itself would like.
            # A model that wants to say nothing but spaces has to go on some time.
            return LLMatcher.grammar_from_json_schema(
                grammar.text, {"whitespace_pattern": SPACES}, {"lenient": False}
            )
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def words_of(grammar: Grammar, message: str) -> str:
    """The library's message without its listing of the source, shortened."""
    lines = [line.strip() for line in message.splitlines()]
    if lines[0].startswith("NoExtension"):
        lines = ["no text matches it"]
    kept = " ".join(line for line in lines if line and not LISTING.match(line))
    cut = kept if len(kept) <= MOST_WORDS else kept[: MOST_WORDS - 3] + "..."
    return f"The {NAMES[grammar.kind]} cannot be used: {cut}"


LISTING = re.compile(r"\d+ \||\^|<non-verbose")
NAMES = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "grammar"}
