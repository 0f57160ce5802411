"""`moestro serve` as a process: what it prints, how it stops, how it fails."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.oracle import tiny

ROOT = Path(__file__).parents[1]
PATIENCE = 60.0  # seconds for what should take far less


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = tiny.Spec(family="qwen3_moe", seed=1, context=8192)
    return tiny.make(tmp_path_factory.mktemp("checkpoint"), spec)


class Server:
    """A `moestro serve` that has said that it is ready."""

    def __init__(self, process: subprocess.Popen[str], printed: str, port: int) -> None:
        self.process = process
        self.printed = printed
        self.url = f"http://127.0.0.1:{port}"

    def stop(self) -> tuple[int, str]:
        """Exit code and standard error."""
        _, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, errors


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "moestro", "serve", *flags, "--threads", "1"]


@contextmanager
def running(*flags: str) -> Iterator[Server]:
    process = subprocess.Popen(
        command(*flags, "--port", "0"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield _when_ready(process)
    finally:
        children = psutil.Process(process.pid).children() if process.poll() is None else []
        process.kill()
        process.communicate()
        _, alive = psutil.wait_procs(children, timeout=5)
        assert alive == [], "the engine outlived its server"


def _when_ready(process: subprocess.Popen[str]) -> Server:
    assert process.stdout is not None
    printed = ""
    for line in process.stdout:
        printed += line
        if found := re.search(r"ready on http://127\.0\.0\.1:(\d+) ", line):
            return Server(process, printed, int(found[1]))
    raise AssertionError(f"it ended: {printed}\n{process.communicate()[1]}")


BODY = {"prompt": "ab", "max_tokens": 1500, "stream": True, "ignore_eos": True}


@contextmanager
def stream(server: Server) -> Iterator[Iterator[str]]:
    """The lines of a long stream, once its first one has come."""
    with (
        httpx.Client(base_url=server.url, timeout=PATIENCE) as client,
        client.stream("POST", "/v1/completions", json=BODY) as reply,
    ):
        assert reply.status_code == 200
        lines = (line for line in reply.iter_lines() if line)
        assert next(lines).startswith("data: {")
        yield lines


def test_it_prints_the_plan_and_where_it_listens_and_stops_when_told(checkpoint: Path) -> None:
    with running(str(checkpoint), "--served-model-name", "tiny", "other") as server:
        printed = server.printed
        assert printed.startswith("Memory\n  dense weights ")
        assert printed.endswith("(model tiny)\n")
        models = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["tiny", "other"]
        assert httpx.get(f"{server.url}/health").status_code == 200
        children = psutil.Process(server.process.pid).children()
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.stop()
        assert code == 0, errors
        assert time.monotonic() - started < 10
        assert "Traceback" not in errors
        assert not any(child.is_running() for child in children)


def test_a_live_stream_finishes_and_new_work_is_refused(checkpoint: Path) -> None:
    flags = ["--shutdown-timeout", str(2 * PATIENCE)]
    with running(str(checkpoint), *flags) as server, stream(server) as lines:
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        refused = httpx.post(f"{server.url}/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert httpx.get(f"{server.url}/ready").status_code == 503
        last = list(lines)[-2:]
        assert json.loads(last[0].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert last[1] == "data: [DONE]"
        assert server.stop()[0] == 0


def test_the_grace_period_ends_a_stream_with_an_error(checkpoint: Path) -> None:
    with running(str(checkpoint), "--shutdown-timeout", "0.2") as server, stream(server) as lines:
        server.process.send_signal(signal.SIGINT)
        rest = list(lines)
        assert any('"error"' in line for line in rest)
        code, errors = server.stop()
        assert code == 0
        assert "--shutdown-timeout" in errors


def test_the_second_signal_does_not_wait(checkpoint: Path) -> None:
    with running(str(checkpoint)) as server, stream(server):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.process.poll() is None
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.stop()
        assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu-memory", "1KiB"], r"bytes .* missing; .*--gpu-memory"),
        (
            ["--port", "1", "--host", "203.0.113.1", "--api-key", "k"],
            "cannot listen on 203.0.113.1:1",
        ),
    ],
)
def test_what_cannot_start_says_why(checkpoint: Path, flags: list[str], message: str) -> None:
    done = subprocess.run(
        command(str(checkpoint), *(["--port", "0"] if "--port" not in flags else []), *flags),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert re.search(f"moestro: .*{message}", done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert "ready" not in done.stdout


def test_the_end_of_the_engine_is_the_end_of_the_server(checkpoint: Path) -> None:
    with running(str(checkpoint)) as server, stream(server) as lines:
        engines = psutil.Process(server.process.pid).children()
        os.kill(engines[0].pid, signal.SIGKILL)
        assert any('"error"' in line for line in lines)
        code, errors = server.stop()
        assert code == 1
        assert "moestro: the engine process ended with code -9" in errors
