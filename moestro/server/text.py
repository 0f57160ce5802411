"""Tokenizer and template off the event loop. Owns: the thread pool and the waiting for it.

A 20 MB prompt takes seconds to tokenize; meanwhile health probes and streams must go on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from moestro.errors import InvalidRequest
from moestro.server.template import ChatTemplate, RenderOptions, find_template
from moestro.server.tokenizer import Tokenizer, read_config

log = logging.getLogger(__name__)

T = TypeVar("T")
LONG = 200_000  # characters; tokenizing more than this takes a noticeable part of a second
SLACK = 5.0  # seconds a template gets past its own limit before the caller stops waiting


class Text:
    """What turns a client's text into token ids. Close it to end its threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        folder: Path | None = None,
        threads: int = 2,
    ) -> None:
        self.folder = folder  # of the checkpoint
        self.tokenizer = tokenizer
        self.template = template
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="moestro-text")
        # One thread of their own, so that short prompts do not wait behind megabytes.
        self._long_pool = ThreadPoolExecutor(1, thread_name_prefix="moestro-long-text")

    @staticmethod
    def from_checkpoint(
        folder: Path,
        *,
        chat_template: str | None = None,
        threads: int = 2,
        template_timeout: float = 10.0,
    ) -> Text:
        """Load both from a checkpoint; `chat_template` (its source) replaces the one found.

        Raises `ModelError`. Only warns when there is no usable template, since plain completions
        need none.
        """
        tokenizer = Tokenizer.from_checkpoint(folder)
        source = chat_template or find_template(folder, read_config(folder))
        if source is None:
            log.warning("the checkpoint has no chat template: chat requests will be refused")
            return Text(tokenizer, None, folder=folder, threads=threads)
        template = ChatTemplate(source, tokenizer.special_tokens, seconds=template_timeout)
        if template.problem is not None:
            log.warning("the chat template is broken, chat is refused: %s", template.problem)
        return Text(tokenizer, template, folder=folder, threads=threads)

    async def run(self, work: Callable[..., T], *args: Any, size: int = 0) -> T:
        """Run `work(*args)` in a pool. Cancelling only stops the waiting. `size`: characters."""
        pool = self._long_pool if size > LONG else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, work, *args)

    async def render(self, messages: Sequence[Any], options: RenderOptions, limit: float) -> str:
        """Return the prompt of a conversation. Raises `InvalidRequest`."""
        if self.template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.")
        try:
            async with asyncio.timeout(limit + SLACK):
                return await self.run(self.template.render, messages, options)
        except TimeoutError:
            raise InvalidRequest(
                f"The chat template did not end within {limit:g} s.", param="messages"
            ) from None

    async def encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        """Return the token ids of `text`."""
        return await self.run(self._encode, text, special, size=len(text))

    def close(self) -> None:
        """Let the threads end; work that runs is finished first."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._long_pool.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, special: bool) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, special=special))
