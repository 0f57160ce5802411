"""Requests that schemathesis makes up from our own OpenAPI document.

Owns: generating and sending them, one after the other. Half of each route's requests follow the
document, half go against it. Does not own: what a reply may be (`verdict`).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import HealthCheck, Phase
from hypothesis.errors import NonInteractiveExampleWarning
from schemathesis import Case, GenerationMode
from schemathesis.core.result import Err

from benchmarks.fuzz import verdict

MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)


class SchemaFuzz:
    """Drives every operation of the document at `url`. `faults` are what was found."""

    def __init__(self, url: str, *, seed: int, timeout: float) -> None:
        self._url = url
        self._seed = seed
        self._timeout = timeout
        self._session = requests.Session()
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []
        document = self._session.get(f"{url}/openapi.json", timeout=timeout).json()
        self._schema = schemathesis.openapi.from_dict(document)

    def run(self, count: int) -> None:
        """Send about `count` requests, more of them to routes that take a body."""
        operations = [_sound(result) for result in self._schema.get_all_operations()]
        weights = [10 if operation.body else 1 for operation in operations]
        for operation, weight in zip(operations, weights, strict=True):
            share = max(2, round(count * weight / sum(weights)))
            # Nothing but a body can be against the document: a path takes any string.
            modes = MODES if operation.body else MODES[:1]
            for mode in modes:
                self._drive(operation, mode, share // len(modes))
        self._session.close()

    def _drive(self, operation: Any, mode: GenerationMode, count: int) -> None:
        @hypothesis.seed(self._seed)
        @hypothesis.settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def one(case: Case[Any]) -> None:
            self._send(case)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonInteractiveExampleWarning)
            one()

    def _send(self, case: Case[Any]) -> None:
        path = case.formatted_path
        try:
            reply = case.call(base_url=self._url, session=self._session, timeout=self._timeout)
        except requests.exceptions.Timeout:
            self.faults.append(f"{case.method} {path}: no answer within {self._timeout:g} s")
            return
        except requests.exceptions.RequestException as error:
            self.faults.append(f"{case.method} {path}: {type(error).__name__}: {error}")
            return
        self.statuses[reply.status_code] += 1
        content_type = next(iter(reply.headers.get("content-type", [])), "")
        head = case.method.upper() == "HEAD"
        found = verdict.fault(path, reply.status_code, content_type, reply.content, head=head)
        if found:
            self.faults.append(f"{case.method} {path}: {found}\n    body: {case.body!r:.400}")


def _sound(result: Any) -> Any:
    """The operation; raises when our document describes it wrongly."""
    if isinstance(result, Err):
        raise result.err()
    return result.ok()


def unique(faults: list[str]) -> Iterator[str]:
    """One of each kind: what differs in numbers only is the same."""
    seen = set()
    for text in faults:
        kind = "".join(c for c in text.split("\n")[0][:160] if not c.isdigit())
        if kind not in seen:
            seen.add(kind)
            yield text
