"""A server that is killed in the middle of a batch, and settings that outlive an engine."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.oracle import tiny
from tests.oracle.serving import Served, serve

pytestmark = pytest.mark.timeout(300)  # servers start several times

LINES = 60
PATIENCE = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return tiny.make(folder / "tiny", tiny.Spec("qwen3_moe", 12, context=1024))


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url, api_key="none")


def content() -> bytes:
    """Requests of many lengths, so that some are always in the middle."""
    rows = [
        {
            "custom_id": f"line-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": [10 + i], "max_tokens": 5 + 7 * (i % 9), "temperature": 0}
            | {"ignore_eos": True},
        }
        for i in range(LINES)
    ]
    rows[7]["body"] = {"prompt": [1], "temperature": -1}
    return "\n".join(map(json.dumps, rows)).encode()


def wait(client: openai.OpenAI, id: str, done: int) -> Batch:
    """The batch, when so many of its requests are done or it has ended."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        batch = client.batches.retrieve(id)
        counts = batch.request_counts
        assert counts is not None
        if counts.completed + counts.failed >= done or batch.status not in OPEN:
            return batch
        time.sleep(0.01)
    raise TimeoutError(batch)


OPEN = ("validating", "in_progress", "finalizing")


def results(client: openai.OpenAI, batch: Batch) -> dict[str, Any]:
    """All results by custom id; each must be there once."""
    found: dict[str, Any] = {}
    for id in (batch.output_file_id, batch.error_file_id):
        assert id is not None
        for row in map(json.loads, client.files.content(id).text.splitlines()):
            assert row["custom_id"] not in found, row
            found[row["custom_id"]] = row["response"]
    return found


def test_every_line_is_answered_once_whatever_is_killed(model: Path, tmp_path: Path) -> None:
    flags = ("--files-dir", str(tmp_path / "files"), "--max-num-seqs", "8")
    with serve(model, *flags, log=tmp_path / "log0") as server, client_of(server) as client:
        file = client.files.create(file=("in.jsonl", content()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        wait(client, batch.id, 5)
        server.engine.kill()  # the engine alone: the batch goes on in this server
        counts = wait(client, batch.id, 12).request_counts
        server.process.kill()
        server.process.wait()
    assert counts is not None
    assert counts.completed + counts.failed < LINES  # it was in the middle
    with serve(model, *flags, log=tmp_path / "log1") as server, client_of(server) as client:
        batch = wait(client, batch.id, LINES + 1)
        while batch.status in OPEN:
            batch = wait(client, batch.id, LINES + 1)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert batch.request_counts.completed == LINES - 1
        found = results(client, batch)
        assert set(found) == {f"line-{i}" for i in range(LINES)}
        assert found["line-7"]["status_code"] == 400
        for i in (0, 25, LINES - 1):  # as an ordinary request says it
            body = json.loads(content().splitlines()[i])["body"]
            said = client.completions.create(
                model="",
                prompt=body["prompt"],
                max_tokens=body["max_tokens"],
                temperature=0,
                extra_body={"ignore_eos": True},
            )
            answer = found[f"line-{i}"]["body"]
            assert answer["choices"][0]["text"] == said.choices[0].text
            assert answer["usage"]["completion_tokens"] == body["max_tokens"]
        server.wait_idle()


def config(server: Served, **asked: Any) -> dict[str, Any]:
    data = json.dumps(asked).encode() if asked else None
    kind = {"content-type": "application/json"}
    request = urllib.request.Request(f"{server.url}/config", data, kind)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return dict(json.load(reply)["values"])


def test_settings_change_under_load_and_outlive_the_engine(model: Path, tmp_path: Path) -> None:
    flags = ("--max-num-seqs", "8", "--expert-slots", "6")
    with serve(model, *flags, log=tmp_path / "log") as server, client_of(server) as client:

        def stream(number: int) -> Any:
            return client.completions.create(
                model="",
                prompt=[10 + number],
                max_tokens=150,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )

        undisturbed = "".join(chunk.choices[0].text for chunk in stream(0))
        live = stream(0)
        text = next(live).choices[0].text
        values = config(server, max_num_seqs=2, expert_policy="activation_aware")
        assert (values["max_num_seqs"], values["expert_policy"]) == (2, "activation_aware")
        others = [stream(number) for number in (1, 2)]
        for policy in ("score", "lfu", "lru", "lru_frequency"):
            config(server, expert_policy=policy)
            text += next(live).choices[0].text
            assert server.stats()["experts"]["policy"] == policy
        assert server.stats()["scheduler"]["waiting"] == 1
        server.engine.kill()
        text += "".join(chunk.choices[0].text for chunk in live)
        assert text == undisturbed
        for other in others:
            assert sum(1 for _ in other)
        assert config(server)["max_num_seqs"] == 2
        blocked = [stream(number) for number in range(3)]
        server.wait(lambda s: s["scheduler"]["running"] == 2, "two running")
        assert server.stats()["scheduler"]["waiting"] == 1
        config(server, max_num_seqs=8)
        for one in blocked:
            assert sum(1 for _ in one)
        server.wait_idle()
        assert "settings changed by a client without a name: max_num_seqs 2 -> 8" in (
            server.log.read_text()
        )
