"""A real server: `moestro serve` as a process of its own, on a free port of this machine.

Owns: starting it, waiting until it serves, looking inside through /admin/stats, ending it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PATIENCE = 60.0  # seconds for anything that should take far less
ROOT = Path(__file__).parents[2]


@dataclass
class Served:
    """A server that answers on `port`."""

    port: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        """Base address of the API."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def engine(self) -> psutil.Process:
        """The engine process: the child that neither tracks resources nor tries grammars."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        others = ("resource_tracker", "moestro.grammar")
        engines = [c for c in children if not any(o in " ".join(c.cmdline()) for o in others)]
        if len(engines) != 1:
            raise AssertionError(f"expected one engine process, there are {engines}")
        return engines[0]

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def health(self) -> dict[str, Any]:
        """What /health says, whether all is well or not."""
        return dict(json.loads(self.get("/health")[1]))

    def stats(self) -> dict[str, Any]:
        """The engine's statistics, fresh."""
        status, body = self.get("/admin/stats")
        if status != 200:
            raise AssertionError(f"/admin/stats answers {status}: {body!r}")
        return dict(json.loads(body)["stats"])

    def wait(self, wanted: Callable[[dict[str, Any]], bool], what: str) -> float:
        """Poll the statistics until `wanted` holds; seconds it took. TimeoutError says `what`."""
        started = time.monotonic()
        while not wanted(stats := self.stats()):
            if time.monotonic() - started > PATIENCE / 2:
                raise TimeoutError(f"not {what}: {stats['scheduler']}, {stats['kv']}")
            time.sleep(0.005)
        return time.monotonic() - started

    def wait_idle(self) -> float:
        """Wait until no sequence runs or waits and no KV block is held."""
        return self.wait(is_idle, "idle")


def is_idle(stats: dict[str, Any]) -> bool:
    """Whether nothing is held for any request."""
    scheduler = stats["scheduler"]
    busy = (scheduler["running"], scheduler["waiting"], stats["kv"]["blocks_used"])
    return busy == (0, 0, 0)


def free_port() -> int:
    """A port that nobody listens on right now."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        return int(door.getsockname()[1])


@contextmanager
def serve(
    model: Path | str, *flags: str, log: Path, threads: int = 1, module: str = "moestro"
) -> Iterator[Served]:
    """Serve `model` (`""` for the demo) while the context lasts; its output goes to `log`.

    `module` is run as the command line.
    """
    port = free_port()
    words = [str(model)] if model else []
    command = [sys.executable, "-m", module, "serve", *words, "--port", str(port)]
    command += ["--device", "cpu", "--threads", str(threads), *flags]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOESTRO_")}
    environment["HF_HUB_OFFLINE"] = "1"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    served = Served(port, process, log)
    try:
        _wait_ready(served)
        yield served
    finally:
        _end(process)


def _wait_ready(served: Served) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        if served.process.poll() is not None:
            break
        try:
            if served.get("/health")[0] == 200:
                return
        except OSError:
            pass  # not listening yet
        time.sleep(0.05)
    shown = served.log.read_text(errors="replace")[-4000:]
    raise AssertionError(f"the server did not come up (exit {served.process.poll()}):\n{shown}")


def _end(process: subprocess.Popen[bytes]) -> None:
    children = _children(process.pid)
    for number, seconds in ((signal.SIGTERM, 20), (signal.SIGTERM, 10), (signal.SIGKILL, 5)):
        if process.poll() is None:  # the second SIGTERM does not wait for live streams
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            break
    alive = [child for child in psutil.wait_procs(children, timeout=5)[1] if not _dead(child)]
    for child in alive:
        child.kill()
    if alive:
        raise AssertionError(f"the server left processes behind: {alive}")


def _dead(process: psutil.Process) -> bool:
    """Gone, or a zombie that nobody reaps (in a container without an init)."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
