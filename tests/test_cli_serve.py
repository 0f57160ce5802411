"""`moestro serve` as a process: what it prints, how it stops, how it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
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

    def __init__(self, process: subprocess.Popen[str], printed: str, url: str) -> None:
        self.process = process
        self.printed = printed
        self.url = url

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
        if found := re.search(r"ready on (https?://127\.0\.0\.1:\d+) ", line):
            return Server(process, printed, found[1])
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


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
def test_doors_of_a_real_server(checkpoint: Path, tmp_path: Path) -> None:
    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=x"
    words = ["openssl", *new.split(), "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    keys, template = tmp_path / "keys", tmp_path / "own.jinja"
    keys.write_text("anna:first-key\n")
    template.write_text("{{ a }}")
    flags = [f"--ssl-certfile={tmp_path}/cert.pem", f"--ssl-keyfile={tmp_path}/key.pem"]
    flags += ["--api-key-file", str(keys), "--log-format", "json", "--log-requests"]
    flags += ["--chat-template", str(template), "--chat-template-kwargs", '{"a": "abcd"}']
    flags += ["--request-timeout", "0.3", "--rate-limit", "5", "--log-level", "info"]
    with running(str(checkpoint), *flags) as server:
        assert server.url.startswith("https://")
        with httpx.Client(base_url=server.url, verify=False, timeout=PATIENCE) as client:
            client.headers["authorization"] = "Bearer first-key"
            chat = {"messages": [{"role": "user", "content": "long " * 50}], "max_tokens": 1}
            usage = client.post("/v1/chat/completions", json=chat).json()["usage"]
            assert usage["prompt_tokens"] <= 4
            late = client.post("/v1/completions", json=BODY | {"stream": False})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
            lines = client.post("/v1/completions", json=BODY).text
            assert '"code":"timeout"' in lines
            assert lines.endswith("data: [DONE]\n\n")
            stats = client.get("/admin/stats").json()
            assert stats["live_calls"] == 0
            assert client.get("/v1/models").status_code == 200
            assert client.get("/v1/models").status_code == 429
            keys.write_text("second-key\n")
            engines = psutil.Process(server.process.pid).children()
            for process in (*engines, server.process):  # as a terminal does
                process.send_signal(signal.SIGHUP)
            time.sleep(0.3)
            assert all(engine.is_running() for engine in engines)
            assert client.get("/v1/models").status_code == 401
            client.headers["authorization"] = "Bearer second-key"
            assert client.get("/v1/models").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.stop()
    assert code == 0
    logged = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    messages = [line["message"] for line in logged]
    assert "1 API keys are accepted now" in messages
    assert any("/v1/chat/completions' by anna: 200" in m and "long long" in m for m in messages)
    assert all(line["time"].endswith("Z") for line in logged)
    assert "first-key" not in errors
    assert "second-key" not in errors


def test_the_end_of_the_last_engine_is_the_end_of_the_server(checkpoint: Path) -> None:
    with running(str(checkpoint), "--engine-restarts", "0") as server, stream(server) as lines:
        engines = psutil.Process(server.process.pid).children()
        os.kill(engines[0].pid, signal.SIGKILL)
        assert any('"error"' in line for line in lines)
        code, errors = server.stop()
        assert code == 1
        assert "moestro: the engine process ended with code -9" in errors
