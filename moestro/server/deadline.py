"""How long a request may take. Owns: `--request-timeout`, for whole replies and for streams.

Does not own: what ends with it. It raises where the waiting is, and leases do the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from moestro.errors import RequestTimeout

T = TypeVar("T")


class Deadline:
    """`seconds` after `arrived` (monotonic); 0 = never."""

    def __init__(self, arrived: float = 0.0, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self._at = arrived + seconds

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """While inside, waiting ends at the deadline. Raises `RequestTimeout` then."""
        left = self._at - time.monotonic() if self._seconds else None
        try:
            async with asyncio.timeout(left) as scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise self._late() from None

    async def each(self, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
        """Yield the items until the deadline. Raises `RequestTimeout` then."""
        while True:
            if self._seconds and time.monotonic() >= self._at:
                raise self._late()
            try:
                async with self.hold():
                    item = await anext(items)
            except StopAsyncIteration:
                return
            yield item

    def _late(self) -> RequestTimeout:
        return RequestTimeout(f"The request took longer than the limit of {self._seconds:g} s.")

    def __bool__(self) -> bool:
        return self._seconds > 0
