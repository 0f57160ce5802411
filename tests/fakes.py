"""A scripted engine and small tokenizers, so that the server can be tested without a model.

The engine says exactly the tokens a test tells it to, one step at a time when asked, and records
what the server does to it. The tokenizers are byte-level, so an emoji costs four tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from moestro.engine.messages import EngineInfo, Tuning
from moestro.errors import ContextTooLong, EngineDead, QueueFull, Unavailable
from moestro.server.detokenize import byte_alphabet
from moestro.stats import EngineStats, KVStats, SchedulerStats
from moestro.types import Finish, Request, Timing, TokenEvent, TokenLogprobs

BOS, EOS, PAD, TURN = range(4)
SPECIAL = ("<|bos|>", "<|im_end|>", "<|pad|>", "<|im_start|>")
FIRST_BYTE = len(SPECIAL)
FIRST_PIECE = FIRST_BYTE + 256
VOCABULARY = 512

TEMPLATE = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['content'] %}{{- m['content'] }}{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


def byte_tokenizer(pieces: Sequence[bytes] = (), *, bos: bool = False) -> Tokenizer:
    """A byte-level BPE without merges; `pieces` are tokens that only the model can say."""
    spell = {byte: char for char, byte in byte_alphabet().items()}
    vocabulary = {name: i for i, name in enumerate(SPECIAL)}
    vocabulary |= {spell[byte]: FIRST_BYTE + byte for byte in range(256)}
    for piece in pieces:
        vocabulary.setdefault("".join(spell[byte] for byte in piece), len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[BOS]} $A", special_tokens=[(SPECIAL[BOS], BOS)]
        )
    return backend


def fallback_tokenizer(words: Sequence[str]) -> Tokenizer:
    """A SentencePiece-like BPE: "▁" for spaces, byte tokens for everything unknown."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for word in words:
        vocabulary.setdefault(word, len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(n, normalized=False) for n in ("<unk>", "<s>", "</s>")])
    return backend


def write_tokenizer(folder: Path, backend: Tokenizer, **config: Any) -> None:
    """Write a checkpoint folder with just the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    content = {"bos_token": SPECIAL[BOS], "eos_token": SPECIAL[EOS], "pad_token": SPECIAL[PAD]}
    (folder / "tokenizer_config.json").write_text(json.dumps(content | config))


def spelled(text: str | bytes) -> list[int]:
    """The byte tokens of a text."""
    data = text.encode() if isinstance(text, str) else text
    return [FIRST_BYTE + byte for byte in data]


Script = Callable[[Request], Sequence[int]]


def info(**changes: Any) -> EngineInfo:
    """Limits of a small engine."""
    values: dict[str, Any] = {
        "max_model_len": 4096,
        "vocab_size": VOCABULARY,
        "kv_tokens": 65536,
        "block_size": 16,
        "eos_token_ids": (EOS,),
        "memory": {"weights": 1024},
        "expert_slots": 4,
        "experts": 8,
    }
    return EngineInfo(**(values | changes))


@dataclass
class _Sequence:
    request: Request
    stream: FakeStream
    script: list[int]
    said: int = 0


class FakeStream:
    """The server's view of a few sequences."""

    def __init__(self, engine: FakeEngine, ids: Sequence[str]) -> None:
        self._engine = engine
        self._open = set(ids)
        self._pending: list[TokenEvent] = []
        self._arrived = asyncio.Event()
        self.left = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.left = True
        for id in sorted(self._open):
            self.abort(id)

    async def batches(self) -> AsyncIterator[list[TokenEvent]]:
        while self._open or self._pending:
            if self._pending:
                batch, self._pending = self._pending, []
                yield batch
                continue
            if self._engine.state == "dead":
                raise EngineDead(self._engine.error or "the engine stopped")
            self._arrived.clear()
            await self._arrived.wait()

    def abort(self, id: str) -> None:
        if id in self._open:
            self._open.discard(id)
            self._engine.drop(id)
            self._arrived.set()

    def push(self, event: TokenEvent) -> None:
        self._pending.append(event)
        if event.finish is not None:
            self._open.discard(event.id)
        self._arrived.set()

    def wake(self) -> None:
        self._arrived.set()


@dataclass
class FakeEngine:
    """Says `script(request)`, then EOS (or its last token for ever when EOS is ignored).

    `manual`: a step only happens when `step()` is called; else a task steps every `delay` seconds.
    """

    script: Script
    limits: EngineInfo = field(default_factory=info)
    per_step: int = 1
    delay: float = 0.0
    manual: bool = False
    seats: int = 256
    max_queued: int = 4096
    state: str = "ready"
    progress: tuple[str, int, int] = ("weights", 1, 4)
    error: str | None = None
    stalled: bool = False
    restarts: int = 0
    fail_next: str | None = None
    slow_stats: float = 0.0

    def __post_init__(self) -> None:
        self.opened: list[Request] = []
        self.aborted: list[str] = []
        self.tuned: list[tuple[Tuning, int]] = []
        self.steps: list[int] = []
        self.totals = EngineStats()
        self._live: dict[str, _Sequence] = {}
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def info(self) -> EngineInfo | None:
        return None if self.state == "loading" else self.limits

    @property
    def open_ids(self) -> list[str]:
        return list(self._live)

    @property
    def foreground(self) -> int:
        return sum(not live.request.background for live in self._live.values())

    @property
    def snapshot(self) -> EngineStats:
        """The same object until somebody scrapes, as with an engine that sends one now and then."""
        return self.totals

    async def stats(self, timeout: float) -> EngineStats:
        await asyncio.sleep(min(timeout, self.slow_stats))
        running = min(len(self._live), self.seats)
        totals = self.totals.scheduler
        self.totals.scheduler = SchedulerStats(
            running=running,
            decoding=running,
            waiting=len(self._live) - running,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
        )
        used = sum(len(s.request.prompt) + s.said + 15 for s in self._live.values()) // 16
        self.totals.kv = KVStats(block_size=16, blocks=4096, blocks_used=used)
        return self.totals

    def open(self, requests: Sequence[Request]) -> FakeStream:
        if self.state == "dead":
            raise EngineDead(self.error or "the engine stopped")
        if self.state == "loading":
            raise Unavailable("the model is still loading", code="loading")
        for request in requests:
            if len(request.prompt) + 1 > self.limits.kv_tokens:
                raise ContextTooLong(f"The KV cache holds {self.limits.kv_tokens} tokens.")
        new = sum(not request.background for request in requests)
        if new and self.foreground + new > self.seats + self.max_queued:
            raise QueueFull(f"The queue is full: {self.max_queued} requests wait.")
        stream = FakeStream(self, [request.id for request in requests])
        for request in requests:
            assert request.id not in self._live, "ids must be unique"
            self.opened.append(request)
            self._live[request.id] = _Sequence(request, stream, list(self.script(request)))
            self.totals.scheduler.prompt_tokens += len(request.prompt)
        self._work.set()
        return stream

    async def tune(self, tuning: Tuning, max_num_queued: int) -> None:
        if self.state != "ready":
            raise Unavailable("The engine is not ready; nothing was changed.", code="engine_busy")
        self.tuned.append((tuning, max_num_queued))

    def drop(self, id: str) -> None:
        if self._live.pop(id, None) is not None:
            self.aborted.append(id)

    async def start(self) -> None:
        if not self.manual:
            self._task = asyncio.create_task(self._run())

    async def aclose(self) -> None:
        self.die("the server is closing")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def die(self, reason: str) -> None:
        self.state, self.error = "dead", reason
        streams = {id(s.stream): s.stream for s in self._live.values()}
        self._live.clear()
        for stream in streams.values():
            stream.wake()

    def end(self, id: str, error: str) -> None:
        """One sequence fails."""
        self._live.pop(id).stream.push(TokenEvent(id, finish=Finish.ERROR, error=error))

    def step(self) -> None:
        """Let every seated sequence say `per_step` tokens."""
        if self.fail_next is not None:
            message, self.fail_next = self.fail_next, None
            for id, sequence in list(self._live.items()):
                del self._live[id]
                sequence.stream.push(TokenEvent(id, finish=Finish.ERROR, error=message))
            return
        for sequence in list(self._live.values())[: self.seats]:
            self._say(sequence)

    async def _run(self) -> None:
        while True:
            if not self._live:
                self._work.clear()
                await self._work.wait()
            self.step()
            await asyncio.sleep(self.delay)

    def _say(self, sequence: _Sequence) -> None:
        request, sampling = sequence.request, sequence.request.sampling
        first = sequence.said == 0
        tokens: list[int] = []
        finish, stop_token = None, None
        while len(tokens) < self.per_step and finish is None:
            token = self._next(sequence)
            tokens.append(token)
            sequence.said += 1
            past = sequence.said > sampling.min_tokens
            if past and token in sampling.eos_token_ids:
                finish = Finish.STOP
            elif past and token in sampling.stop_token_ids:
                finish, stop_token = Finish.STOP, token
            elif sequence.said >= sampling.max_tokens:
                finish = Finish.LENGTH
        self.totals.scheduler.generation_tokens += len(tokens)
        if finish is not None:
            del self._live[request.id]
        scores: tuple[TokenLogprobs, ...] = ()
        if sampling.logprobs is not None:
            scores = tuple(self.score(token, sampling.logprobs) for token in tokens)
        event = TokenEvent(
            id=request.id,
            token_ids=tuple(tokens),
            logprobs=scores,
            prompt_logprobs=self._prompt_scores(request) if first else None,
            finish=finish,
            stop_token=stop_token,
            timing=Timing(0.001, 0.002, 0.003, 0.0005, 3, 0) if first or finish else None,
        )
        sequence.stream.push(event)

    def _next(self, sequence: _Sequence) -> int:
        if sequence.said < len(sequence.script):
            return sequence.script[sequence.said]
        if sequence.request.sampling.eos_token_ids:
            return EOS
        return sequence.script[-1] if sequence.script else spelled("x")[0]

    @staticmethod
    def score(token: int, top: int) -> TokenLogprobs:
        """A log-probability that tells which token it is of."""
        value = -0.25 - (token % 8) / 8
        best = [((token + i) % VOCABULARY, value - i / 2) for i in range(top)]
        return TokenLogprobs(token, value, tuple(best))

    def _prompt_scores(self, request: Request) -> tuple[TokenLogprobs | None, ...] | None:
        top = request.sampling.prompt_logprobs
        if top is None:
            return None
        return (None, *(self.score(token, top) for token in request.prompt[1:]))
