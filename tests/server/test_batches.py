"""/v1/files and /v1/batches, driven by the OpenAI client where it has a call for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from moestro.errors import ConfigError
from moestro.server.auth import hash_key
from moestro.server.files_store import FileStore
from tests.server.conftest import Make, Server, Setup, saying

CHAT = "/v1/chat/completions"
PLAIN = "/v1/completions"
FORM = {"content-type": "multipart/form-data; boundary=b"}


def line(id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    if url == CHAT:
        body = {"model": "tiny", "messages": [{"role": "user", "content": id}], **body}
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join(
        (item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in lines
    )


def client_of(server: Server, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://test/v1", api_key=key, http_client=server.client, max_retries=0
    )


@pytest.fixture
def folder(tmp_path: Path) -> dict[str, Any]:
    return {"files_dir": tmp_path / "kept"}


async def started(
    client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT, **asked: Any
) -> Batch:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    asked = {"completion_window": "24h", **asked}
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, **asked)


async def ended(client: openai.AsyncOpenAI, batch: Batch, seconds: float = 10) -> Batch:
    async with asyncio.timeout(seconds):
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def rows(client: openai.AsyncOpenAI, id: str | None) -> dict[str, Any]:
    if id is None:
        return {}
    text = (await client.files.content(id)).text
    assert text.endswith("\n")
    found = [json.loads(row) for row in text.splitlines()]
    assert len({row["custom_id"] for row in found}) == len(found)
    return {row["custom_id"]: row for row in found}


# --- files ----------------------------------------------------------------------------------


async def test_the_life_of_a_file(make: Make, folder: dict[str, Any]) -> None:
    async with make("x", settings=folder) as server:
        client = client_of(server)
        content = jsonl(line("a"))
        file = await client.files.create(file=("../dir/in.jsonl", content), purpose="batch")
        assert (file.object, file.bytes, file.filename) == ("file", len(content), "in.jsonl")
        assert (file.purpose, file.status, file.expires_at) == ("batch", "processed", None)
        assert await client.files.retrieve(file.id) == file
        assert (await client.files.content(file.id)).content == content
        gone = await client.files.delete(file.id)
        assert (gone.id, gone.deleted, gone.object) == (file.id, True, "file")
        for call in (client.files.retrieve, client.files.content, client.files.delete):
            with pytest.raises(openai.NotFoundError):
                await call(file.id)
        assert server.app.state.service.files.used == 0
        assert list((folder["files_dir"] / "files").iterdir()) == []


async def test_lists_have_pages(make: Make, folder: dict[str, Any]) -> None:
    async with make("x", settings=folder) as server:
        client = client_of(server)
        ids = []
        for number in range(5):
            file = await client.files.create(file=(f"{number}", b"x"), purpose="batch")
            ids.append(file.id)
        assert [file.id async for file in await client.files.list(limit=2)] == ids[::-1]
        found = [file.id async for file in await client.files.list(limit=3, order="asc")]
        assert found == ids
        first = await client.files.list(limit=2, order="asc", after=ids[1])
        assert [file.id for file in first.data] == ids[2:4]
        assert first.has_more
        assert [file async for file in await client.files.list(purpose="batch_output")] == []
        for query, param in (
            ("limit=0", "limit"),
            ("limit=x", "limit"),
            ("after=file-none", "after"),
            ("order=up", "order"),
            ("purpose=vision", "purpose"),
        ):
            response = await server.client.get(f"/v1/files?{query}")
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"files": {"file": ("a", b"x")}}, "purpose"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "vision"}}, "purpose"),
        ({"files": {"other": ("a", b"x")}, "data": {"purpose": "batch"}}, "file"),
        (
            {"files": [("file", ("a", b"x")), ("file", ("b", b"x"))], "data": {"purpose": "batch"}},
            "file",
        ),
        (
            {
                "files": {"file": ("a", b"x")},
                "data": {"purpose": "batch", "expires_after[anchor]": "created_at"},
            },
            "expires_after[seconds]",
        ),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "b" * 5000}}, None),
        ({"json": {"purpose": "batch"}}, None),
        (
            {"content": b"--b\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}},
            None,
        ),
        (
            {"content": b"what", "headers": {"content-type": "multipart/form-data; boundary=b"}},
            None,
        ),
        ({"content": b"", "headers": {"content-type": "multipart/form-data"}}, None),
    ],
)
async def test_bad_uploads_leave_nothing(
    make: Make, folder: dict[str, Any], form: dict[str, Any], param: str | None
) -> None:
    async with make("x", settings=folder) as server:
        response = await server.client.post("/v1/files", **form)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert server.app.state.service.files.used == 0
        assert list((folder["files_dir"] / "files").iterdir()) == []


async def test_sizes_are_limited(make: Make, folder: dict[str, Any]) -> None:
    settings = folder | {"max_file_size": 3_000_000, "files_quota": 5_000_000}
    async with make("x", settings=settings | {"max_request_body": 1000}) as server:
        client, used = client_of(server), server.app.state.service.files
        file = await client.files.create(file=("a", b"x" * 3_000_000), purpose="batch")
        with pytest.raises(openai.APIStatusError) as caught:
            await client.files.create(file=("a", b"x" * 3_000_001), purpose="batch")
        assert caught.value.status_code == 413
        assert "--max-file-size" in caught.value.message
        with pytest.raises(openai.APIStatusError) as caught:
            await client.files.create(file=("a", b"x" * 9_000_000), purpose="batch")
        assert caught.value.status_code == 413
        with pytest.raises(openai.BadRequestError) as refused:
            await client.files.create(file=("a", b"x" * 2_000_001), purpose="batch")
        assert refused.value.code == "files_quota_exceeded"
        assert used.used == 3_000_000
        await client.files.create(file=("a", b"x" * 2_000_000), purpose="batch")
        await client.files.delete(file.id)
        assert used.used == 2_000_000
        # The larger limit is for uploads only.
        assert (await server.complete(prompt="a" * 1000)).status_code == 413


async def test_files_expire(make: Make, folder: dict[str, Any]) -> None:
    async with make("x", settings=folder) as server:
        client, store = client_of(server), server.app.state.service.files
        after: Any = {"anchor": "created_at", "seconds": 3600}
        file = await client.files.create(file=("a", b"x"), purpose="batch", expires_after=after)
        assert file.expires_at == file.created_at + 3600
        clock = store._clock
        store._clock = lambda: clock() + 3599
        assert (await client.files.retrieve(file.id)).id == file.id
        store._clock = lambda: clock() + 3601
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
        assert (await client.files.list()).data == []
        assert list((folder["files_dir"] / "files").iterdir()) == []


async def test_without_a_folder_the_flag_is_named(make: Make) -> None:
    async with make("x") as server:
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("GET", "/v1/files/file-1"),
            ("GET", "/v1/batches"),
            ("POST", "/v1/batches"),
            ("POST", "/v1/batches/b/cancel"),
        ):
            response = await server.client.request(method, path)
            assert response.status_code == 404
            assert "--files-dir" in response.json()["error"]["message"]


async def test_ids_never_become_paths(make: Make, folder: dict[str, Any]) -> None:
    async with make("x", settings=folder) as server:
        secret = folder["files_dir"] / "secret.data"
        secret.write_text("secret")
        for id in ("../secret", "..%2Fsecret", "%2e%2e%2fsecret", "..%00", "a" * 9000):
            for path in (f"/v1/files/{id}", f"/v1/files/{id}/content"):
                for method in ("GET", "DELETE"):
                    response = await server.client.request(method, path)
                    assert response.status_code in (404, 405), (method, path)
                    assert "secret" not in response.text
            batch = {"input_file_id": id, "endpoint": CHAT, "completion_window": "1h"}
            assert (await server.post("/v1/batches", batch)).status_code == 404
        assert secret.read_text() == "secret"


async def test_what_belongs_to_one_key_is_nothing_to_another(
    make: Make, folder: dict[str, Any], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna:one\nanna:one-new\nbo:two\nplain\n")
    async with make("x", settings=folder | {"api_key_file": keys}) as server:
        anna, bo, plain = (client_of(server, key) for key in ("one", "two", "plain"))
        batch = await started(anna, jsonl(line("a")))
        batch = await ended(anna, batch)
        assert batch.output_file_id is not None
        mine = await plain.files.create(file=("a", b"x"), purpose="batch")
        for client in (bo, plain):
            for id in (batch.input_file_id, batch.output_file_id):
                with pytest.raises(openai.NotFoundError):
                    await client.files.retrieve(id)
                with pytest.raises(openai.NotFoundError):
                    await client.files.content(id)
                with pytest.raises(openai.NotFoundError):
                    await client.files.delete(id)
                with pytest.raises(openai.NotFoundError):
                    await client.batches.create(
                        input_file_id=id, endpoint=CHAT, completion_window="24h"
                    )
            with pytest.raises(openai.NotFoundError):
                await client.batches.retrieve(batch.id)
            with pytest.raises(openai.NotFoundError):
                await client.batches.cancel(batch.id)
            assert (await client.batches.list()).data == []
        assert (await bo.files.list()).data == []
        assert [file.id for file in (await plain.files.list()).data] == [mine.id]
        # A new key of the same name goes on with the files of the old one.
        assert (await client_of(server, "one-new").batches.retrieve(batch.id)).id == batch.id
    kept = b"".join(p.read_bytes() for p in folder["files_dir"].rglob("*.json"))
    for secret in ("one", "two", "plain"):
        assert f'"{secret}"'.encode() not in kept
        assert hash_key(secret).hex().encode() not in kept


def test_only_the_user_can_read_what_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "kept"
    store = FileStore(root, max_file=10, quota=10)
    try:
        assert (root / "files").stat().st_mode & 0o077 == 0
        assert root.stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="another server uses it"):
            FileStore(root, max_file=10, quota=10)
    finally:
        store.close()
    FileStore(root, max_file=10, quota=10).close()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match="--files-dir"):
        FileStore(blocked, max_file=10, quota=10)


# --- batches --------------------------------------------------------------------------------


async def test_a_batch_from_upload_to_results(make: Make, folder: dict[str, Any]) -> None:
    async with make("hello", settings=folder) as server:
        client = client_of(server)
        lines = [line(f"id-{i}", max_tokens=3) for i in range(30)]
        lines.append(line("bad", temperature=99))
        lines.append(line("stream", stream=True))
        lines.append(line("first", priority=-5))
        batch = await started(client, jsonl(*lines), metadata={"job": "nightly"})
        assert batch.status in ("validating", "in_progress")
        assert (batch.object, batch.endpoint) == ("batch", CHAT)
        assert batch.expires_at == batch.created_at + 86400
        batch = await ended(client, batch)
        assert (batch.status, batch.errors, batch.model) == ("completed", None, "tiny")
        assert batch.metadata == {"job": "nightly"}
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (33, 30, 3)
        assert batch.in_progress_at is not None
        assert batch.finalizing_at is not None
        assert batch.completed_at is not None
        assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
        good = await rows(client, batch.output_file_id)
        assert set(good) == {f"id-{i}" for i in range(30)}
        row = good["id-7"]
        assert row["id"].startswith("batch_req_")
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        assert row["response"]["request_id"].startswith("req-")
        body = row["response"]["body"]
        assert body["choices"][0]["message"]["content"] == "hel"
        assert body["object"] == "chat.completion"
        bad = await rows(client, batch.error_file_id)
        assert {
            id: (row["response"]["status_code"], row["response"]["body"]["error"]["param"])
            for id, row in bad.items()
        } == {
            "bad": (400, "temperature"),
            "stream": (400, "stream"),
            "first": (400, "priority"),
        }
        assert batch.usage is not None
        assert batch.usage.output_tokens == 90
        used = [row["response"]["body"]["usage"]["prompt_tokens"] for row in good.values()]
        assert batch.usage.input_tokens == sum(used)
        files = {file.id: file async for file in await client.files.list(purpose="batch_output")}
        assert set(files) == {batch.output_file_id, batch.error_file_id}
        assert files[str(batch.output_file_id)].filename == f"{batch.id}_output.jsonl"
        assert [b.id for b in (await client.batches.list()).data] == [batch.id]


async def test_plain_completions_and_several_choices(make: Make, folder: dict[str, Any]) -> None:
    async with make("abcd", settings=folder) as server:
        client = client_of(server)
        content = jsonl(
            line("a", PLAIN, prompt="x", max_tokens=2, n=3),
            line("b", PLAIN, prompt=["x", "y"], max_tokens=1),
        )
        batch = await ended(client, await started(client, content.rstrip(b"\n"), PLAIN))
        good = await rows(client, batch.output_file_id)
        choices = {
            id: [c["text"] for c in row["response"]["body"]["choices"]] for id, row in good.items()
        }
        assert choices == {"a": ["ab"] * 3, "b": ["a"] * 2}
        assert batch.error_file_id is None


@pytest.mark.parametrize(
    ("content", "errors"),
    [
        (b"", [("empty_file", None, None)]),
        (b"\n \n", [("empty_file", None, None)]),
        (b"{\n[1]\n", [("invalid_json_line", 1, None), ("invalid_json_line", 2, None)]),
        (b'"\xff"\n', [("invalid_json_line", 1, None)]),
        (b"[" * 1500, [("invalid_json_line", 1, None)]),
        (
            jsonl(line("a"), line("a"), {"method": "POST"}, line("b", PLAIN, prompt="x")),
            [
                ("duplicate_custom_id", 2, "custom_id"),
                ("missing_required_parameter", 3, "custom_id"),
                ("invalid_url", 4, "url"),
            ],
        ),
        (
            jsonl(
                line("a") | {"method": "GET"},
                line("b") | {"body": []},
                line("c") | {"custom_id": 7},
                line("d") | {"custom_id": ""},
                line("e", model="else"),
                line("f", model=3),
            ),
            [
                ("invalid_method", 1, "method"),
                ("invalid_body", 2, "body"),
                ("invalid_custom_id", 3, "custom_id"),
                ("invalid_custom_id", 4, "custom_id"),
                ("model_not_found", 5, "body.model"),
                ("invalid_model", 6, "body.model"),
            ],
        ),
        (jsonl(line("a", pad="x" * 3000)), [("line_too_long", 1, None)]),
    ],
)
async def test_a_bad_input_fails_line_by_line(
    make: Make, folder: dict[str, Any], content: bytes, errors: list[Any]
) -> None:
    async with make("x", settings=folder | {"max_request_body": 2000}) as server:
        client = client_of(server)
        batch = await ended(client, await started(client, content))
        assert batch.status == "failed"
        assert batch.failed_at is not None
        assert batch.errors is not None
        assert batch.errors.object == "list"
        found = [(e.code, e.line, e.param) for e in batch.errors.data or []]
        assert found == errors
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        assert server.engine.opened == []
        await client.files.delete(batch.input_file_id)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"endpoint": None}, 400, "endpoint"),
        ({"completion_window": None}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"input_file_id": "file-none"}, 404, "file_id"),
        ({"input_file_id": None}, 400, "input_file_id"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, 400, "metadata"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 5}},
            400,
            "output_expires_after[seconds]",
        ),
    ],
)
async def test_bad_batches_are_refused(
    make: Make, folder: dict[str, Any], change: dict[str, Any], status: int, param: str
) -> None:
    async with make("x", settings=folder) as server:
        file = await client_of(server).files.create(file=("a", jsonl(line("a"))), purpose="batch")
        body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        response = await server.post("/v1/batches", body | change)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)
        assert (await server.client.get("/v1/batches")).json()["data"] == []


async def test_cancelling_ends_what_runs(make: Make, folder: dict[str, Any]) -> None:
    async with make("x" * 99, engine={"manual": True}, settings=folder) as server:
        client = client_of(server)
        lines = [line(f"{i}", max_tokens=1 if i == 0 else 50) for i in range(300)]
        batch = await started(client, jsonl(*lines))
        await opened(server, 20)
        assert await completed(server, client, batch, 1) == 1
        with pytest.raises(openai.BadRequestError, match="input of batch_"):
            await client.files.delete(batch.input_file_id)
        batch = await client.batches.cancel(batch.id)
        assert batch.status == "cancelling"
        batch = await ended(client, batch)
        assert batch.status == "cancelled"
        assert batch.cancelling_at is not None
        assert batch.cancelled_at is not None
        assert server.engine.open_ids == []
        assert set(await rows(client, batch.output_file_id)) == {"0"}
        left = await rows(client, batch.error_file_id)
        assert len(left) == 299
        assert {(r["response"], r["error"]["code"]) for r in left.values()} == {
            (None, "batch_cancelled")
        }
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 299)
        with pytest.raises(openai.BadRequestError, match="'cancelled' cannot be cancelled"):
            await client.batches.cancel(batch.id)


async def opened(server: Server, count: int) -> None:
    async with asyncio.timeout(5):
        while len(server.engine.opened) < count:
            await asyncio.sleep(0.005)


async def completed(
    server: Server, client: openai.AsyncOpenAI, batch: Batch, least: int, patience: int = 30
) -> int:
    """Let the engine go on until so many requests are done; how many are then."""
    for _ in range(patience):
        server.engine.step()
        await asyncio.sleep(0.1)
        counts = (await client.batches.retrieve(batch.id)).request_counts
        assert counts is not None
        if counts.completed >= least:
            return counts.completed
    raise AssertionError("the batch stands still")


async def test_a_batch_expires(make: Make, folder: dict[str, Any]) -> None:
    async with make("x" * 99, engine={"manual": True}, settings=folder) as server:
        client = client_of(server)
        after: Any = {"anchor": "created_at", "seconds": 7200}
        lines = [line(f"{i}", max_tokens=1 if i == 0 else 50) for i in range(9)]
        batch = await started(
            client, jsonl(*lines), completion_window="1s", output_expires_after=after
        )
        await opened(server, 9)
        server.engine.step()
        batch = await ended(client, batch)
        assert batch.status == "expired"
        assert batch.expired_at is not None
        assert batch.expired_at >= batch.created_at + 1
        assert server.engine.open_ids == []
        assert set(await rows(client, batch.output_file_id)) == {"0"}
        left = await rows(client, batch.error_file_id)
        assert {row["error"]["code"] for row in left.values()} == {"batch_expired"}
        assert len(left) == 8
        output = await client.files.retrieve(str(batch.output_file_id))
        assert output.expires_at == output.created_at + 7200


async def test_interactive_requests_go_first(make: Make, folder: dict[str, Any]) -> None:
    engine = {"seats": 4, "max_queued": 1, "manual": True}
    settings = folder | {"max_num_seqs": 4}
    async with make("x" * 99, engine=engine, settings=settings) as server:
        client = client_of(server)
        batch = await started(client, jsonl(*[line(f"{i}", max_tokens=5) for i in range(20)]))
        await opened(server, 2)
        await asyncio.sleep(0.1)
        assert len(server.engine.open_ids) == 2  # half of the seats
        assert all(r.background and r.priority == 2**63 - 1 for r in server.engine.opened)
        # All of the queue is still there for others.
        tasks = [asyncio.create_task(server.chat(max_tokens=5)) for _ in range(5)]
        await opened(server, 7)
        assert (await server.chat()).status_code == 503
        for _ in range(5):
            server.engine.step()
        await asyncio.sleep(0.2)
        # Two of the batch have ended; with no seat left by others one may come, not two.
        assert sum(r.background for r in server.engine.opened) == 3
        async with asyncio.timeout(10):
            while batch.status != "completed":
                server.engine.step()
                await asyncio.sleep(0.005)
                batch = await client.batches.retrieve(batch.id)
        assert [(await task).status_code for task in tasks] == [200] * 5


async def test_a_large_call_runs_alone(make: Make, folder: dict[str, Any]) -> None:
    settings = folder | {"max_num_seqs": 8, "max_num_batch_seqs": 2}
    most = 0

    def script(request: Any) -> list[int]:
        nonlocal most
        most = max(most, len(server.engine.open_ids) + 1)
        return [100]

    async with make(script, settings=settings) as server:
        client = client_of(server)
        lines = [line(f"{i}", max_tokens=1, n=6 if i == 2 else 1) for i in range(6)]
        batch = await ended(client, await started(client, jsonl(*lines)))
        assert len(await rows(client, batch.output_file_id)) == 6
        assert most == 6


async def test_a_step_that_fails_is_an_error_of_its_lines(
    make: Make, folder: dict[str, Any]
) -> None:
    async with make("x" * 99, engine={"manual": True}, settings=folder) as server:
        client = client_of(server)
        batch = await started(client, jsonl(*[line(f"{i}", max_tokens=2) for i in range(3)]))
        await opened(server, 3)
        server.engine.fail_next = "the step failed"
        server.engine.step()
        batch = await ended(client, batch)
        assert batch.status == "completed"
        bad = await rows(client, batch.error_file_id)
        codes = {r["response"]["body"]["error"]["code"] for r in bad.values()}
        assert (len(bad), codes) == (3, {"step_failed"})


async def test_an_engine_that_is_away_is_waited_for(make: Make, folder: dict[str, Any]) -> None:
    async with make("x", engine={"state": "loading"}, settings=folder) as server:
        client = client_of(server)
        batch = await started(client, jsonl(*[line(f"{i}") for i in range(3)]))
        await asyncio.sleep(0.1)
        assert (await client.batches.retrieve(batch.id)).status == "in_progress"
        server.engine.state = "ready"
        batch = await ended(client, batch)
        assert len(await rows(client, batch.output_file_id)) == 3


async def test_a_full_disk_loses_nothing(
    make: Make, folder: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from moestro.server import batches_results, files_disk

    monkeypatch.setattr(batches_results, "RETRY", 0.05)
    whole, full = files_disk.os.pwrite, [True, False, True, True]

    def pwrite(handle: int, data: Any, at: int) -> int:
        if full and full.pop(0):
            whole(handle, data[: len(data) // 2], at)
            raise OSError(28, "No space left on device")
        return whole(handle, data, at)

    monkeypatch.setattr(files_disk.os, "pwrite", pwrite)
    async with make("x", settings=folder) as server:
        client = client_of(server)
        lines = [line(f"{i}", temperature=99 * (i % 2)) for i in range(40)]
        batch = await ended(client, await started(client, jsonl(*lines)))
        assert full == []
        good = await rows(client, batch.output_file_id)
        bad = await rows(client, batch.error_file_id)
        assert (len(good), len(bad), len(good | bad)) == (20, 20, 40)


# --- a server that is started again ---------------------------------------------------------


@asynccontextmanager
async def stopped(folder: dict[str, Any]) -> AsyncIterator[Server]:
    """A server that is stopped in the middle of work."""
    app, engine = Setup(saying("x" * 99), settings=folder, engine={"manual": True}).build()
    transport = httpx.ASGITransport(app=app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
        app.router.lifespan_context(app),
    ):
        yield Server(app, engine, client)
    assert engine.open_ids == []


async def test_a_stopped_server_goes_on(make: Make, folder: dict[str, Any]) -> None:
    lines = [line(f"{i}", max_tokens=1 if i < 10 else 30) for i in range(60)]
    async with stopped(folder) as server:
        client = client_of(server)
        batch = await started(client, jsonl(*lines))
        await opened(server, 30)
        done = await completed(server, client, batch, 5)
        assert done <= 10
    output = next((folder["files_dir"] / "files").glob("*.data"))
    for path in (folder["files_dir"] / "files").glob("*.data"):
        if b'"response"' in path.read_bytes():
            output = path
    with output.open("ab") as file:
        file.write(b'{"id":"batch_req_torn","custom_id":"59","resp')  # as a crash leaves it
    stray = folder["files_dir"] / "files" / "file-stray.data"
    stray.write_bytes(b"an upload that was cut")
    async with make("x" * 99, settings=folder) as server:
        client = client_of(server)
        assert not stray.exists()
        batch = await ended(client, await client.batches.retrieve(batch.id))
        assert batch.status == "completed"
        good = await rows(client, batch.output_file_id)
        assert set(good) == {f"{i}" for i in range(60)}
        assert len(server.engine.opened) == 60 - done  # what was done is not done again
        assert batch.usage is not None
        assert batch.usage.output_tokens == 10 + 50 * 30
        used = server.app.state.service.files.used
        sizes = [file.bytes for file in (await client.files.list()).data]
        assert used == sum(sizes)


@pytest.mark.parametrize("outcome", ["cancelled", "completed", "expired"])
async def test_an_end_that_was_decided_stays(
    make: Make, folder: dict[str, Any], outcome: str
) -> None:
    async with stopped(folder) as server:
        client = client_of(server)
        batch = await started(client, jsonl(line("a", max_tokens=30), line("b", max_tokens=30)))
        await opened(server, 2)
    path = folder["files_dir"] / "batches" / f"{batch.id}.json"
    state = json.loads(path.read_text())
    assert state["status"] == "in_progress"
    if outcome == "expired":
        state["expires_at"] = state["made"] // 10**9 - 1
    elif outcome == "cancelled":
        state |= {"status": "cancelling", "outcome": outcome}
    path.write_text(json.dumps(state))
    async with make("x" * 99, settings=folder) as server:
        client = client_of(server)
        batch = await ended(client, await client.batches.retrieve(batch.id))
        assert batch.status == outcome
        good = await rows(client, batch.output_file_id)
        bad = await rows(client, batch.error_file_id)
        assert (len(good), len(bad)) == ((2, 0) if outcome == "completed" else (0, 2))
    async with make("x", settings=folder) as server:  # and once more: nothing moves
        assert await client_of(server).batches.retrieve(batch.id) == batch
        assert server.engine.opened == []


async def test_a_damaged_folder_is_named(make: Make, folder: dict[str, Any]) -> None:
    (folder["files_dir"] / "batches").mkdir(parents=True)
    (folder["files_dir"] / "batches" / "batch_1.json").write_text("{")
    with pytest.raises(ConfigError, match="--files-dir"):
        async with make("x", settings=folder):
            pass
    (folder["files_dir"] / "batches" / "batch_1.json").unlink()
    async with make("x", settings=folder) as server:
        assert isinstance(server.client, httpx.AsyncClient)


async def test_responses_can_be_batched(make: Make, folder: dict[str, Any]) -> None:
    async with make("abcd", settings=folder) as server:
        client = client_of(server)
        content = jsonl(line("a", "/v1/responses", input="hi", max_output_tokens=2))
        batch = await ended(client, await started(client, content, "/v1/responses"))
        good = await rows(client, batch.output_file_id)
        body = good["a"]["response"]["body"]
        assert body["output"][0]["content"][0]["text"] == "ab"
        assert batch.usage is not None
        assert (batch.usage.output_tokens, batch.usage.input_tokens > 2) == (2, True)
        assert server.engine.opened[0].background
