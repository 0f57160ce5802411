"""Trying a grammar in a process of its own, which can be stopped.

Owns: that process, and the time a grammar may take. Compiling cannot be interrupted, and a few
hundred characters can make it take hours, or more memory than there is; so what comes from outside
is compiled here first. Verdicts are remembered.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from pathlib import Path

from moestro.errors import GrammarError, Unavailable
from moestro.types import Grammar

MOST_SECONDS = 2.0  # to compile one grammar and its first masks
START_SECONDS = 60.0  # for the process to start and read the tokenizer
WAIT_SECONDS = 10.0  # for other grammars' trials
MOST_KEPT = 256  # verdicts


class Trial:
    """One process that compiles what it is told, started when the first grammar comes."""

    def __init__(self, folder: Path, size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._start = {"folder": str(folder), "size": size, "eos_token_ids": eos_token_ids}
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[Grammar, str | None] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[[subprocess.Popen[bytes]], Trial] | None = None

    def run(self, grammar: Grammar) -> None:
        """Raise GrammarError unless `grammar` compiles in `MOST_SECONDS`. Blocks."""
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise Unavailable("Too many grammars are waiting to be compiled. Try again later.")
        try:
            if grammar not in self._verdicts:
                self._remember(grammar, self._verdict(grammar))
            self._verdicts.move_to_end(grammar)
            verdict = self._verdicts[grammar]
        finally:
            self._lock.release()
        if verdict is not None:
            raise GrammarError(verdict)

    def close(self) -> None:
        """End the process. Another trial would start one again."""
        if self._process is not None:
            self._process.kill()  # whoever waits for its answer need wait no longer
        with self._lock:
            self._stop()

    def _remember(self, grammar: Grammar, verdict: str | None) -> None:
        self._verdicts[grammar] = verdict
        if len(self._verdicts) > MOST_KEPT:
            self._verdicts.popitem(last=False)

    def _verdict(self, grammar: Grammar) -> str | None:
        """What is wrong with it. GrammarError when it was too much: on another day it may do."""
        process = self._running()
        try:
            return _ask(process, {"kind": grammar.kind, "text": grammar.text}, MOST_SECONDS)
        except TimeoutError:
            self._stop()
            raise GrammarError(
                f"The grammar takes over {MOST_SECONDS:g} seconds to compile."
            ) from None
        except OSError:
            self._stop()
            raise GrammarError(
                "The grammar is too much for the compiler, which ended while it compiled it."
            ) from None

    def _running(self) -> subprocess.Popen[bytes]:
        """The process, ready to be asked."""
        if self._process is not None:
            return self._process
        command = [sys.executable, "-m", "moestro.grammar.trial_process"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process, self._end = process, weakref.finalize(self, _end, process)
        try:
            problem = _ask(process, self._start, START_SECONDS)
        except OSError:
            problem = "Grammars cannot be compiled: the process for it does not start."
        if problem is not None:
            self._stop()
            raise GrammarError(problem)
        return process

    def _stop(self) -> None:
        if self._end is not None:
            self._end()
        self._process = self._end = None


def _ask(process: subprocess.Popen[bytes], question: object, seconds: float) -> str | None:
    """Send a line and wait for the answer's: what is wrong, or None. BrokenPipeError when the
    process is gone, TimeoutError when it says nothing for so long."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(question).encode() + b"\n")
    process.stdin.flush()
    deadline = time.monotonic() + seconds
    answers = select.poll()
    answers.register(process.stdout, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not answers.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            raise BrokenPipeError
        line += part
    problem = json.loads(line)["problem"]
    assert problem is None or isinstance(problem, str)
    return problem


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except OSError:  # what was not written cannot be flushed now
            continue
