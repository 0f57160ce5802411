"""Flags of the HTTP side, from the words of a command line to what a client sees."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from moestro.config import Config, load
from moestro.errors import ConfigError
from moestro.server.cli_flags import config_flags, config_parser
from moestro.server.cli_model import Model
from moestro.server.cli_serve import server_settings
from moestro.server.doors import check_doors, read_template
from moestro.server.template import ChatTemplate, RenderOptions
from moestro.server.text import Text
from tests.oracle import tiny
from tests.server.conftest import Make


def parse(*words: str) -> Config:
    return load(config_flags(config_parser("moestro serve", ""), words), {})


def told(folder: Path, *words: str) -> dict[str, Any]:
    """What these flags make the HTTP side's settings, as the fixtures take them."""
    settings = server_settings(parse(*words), Model(folder, ("tiny", "org/tiny")))
    return {name: getattr(settings, name) for name in type(settings).__dataclass_fields__}


async def test_accept_any_model(make: Make, tmp_path: Path) -> None:
    for words, status in (((), 404), (("--accept-any-model",), 200)):
        async with make("x", settings=told(tmp_path, *words)) as server:
            assert (await server.chat(model="gpt-9")).status_code == status


def test_keys_and_limits_reach_the_server(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    settings = told(tmp_path, "--api-key-file", str(file), "--rate-limit", "7")
    assert (settings["api_key_file"], settings["rate_limit"]) == (file, 7)
    assert told(tmp_path)["rate_limit"] is None


async def test_cors_origins(make: Make, tmp_path: Path) -> None:
    headers = {"origin": "https://a.example"}
    name = "access-control-allow-origin"
    flags = ("--cors-origins", "https://a.example", "http://[::1]:3000")
    for words, shown in (((), None), (flags, "https://a.example"), (("--cors-origins=*",), "*")):
        async with make("x", settings=told(tmp_path, *words)) as server:
            response = await server.client.get("/health", headers=headers)
            assert response.headers.get(name) == shown


async def test_no_docs(make: Make, tmp_path: Path) -> None:
    for words, status in (((), 200), (("--no-docs",), 404), (("--docs",), 200)):
        async with make("x", settings=told(tmp_path, *words)) as server:
            for path in ("/docs", "/openapi.json"):
                assert (await server.client.get(path)).status_code == status


async def test_keep_alive_comments(listen: Make, tmp_path: Path) -> None:
    for words, comments in (((), False), (("--sse-keep-alive-interval", "0.05"), True)):
        settings = told(tmp_path, *words)
        async with listen("xy", engine={"delay": 0.2}, settings=settings) as server:
            text = (await server.complete(stream=True)).text
            assert (": keep-alive\n\n" in text) == comments
            assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("comments", ["0", "0.05"])
async def test_send_timeout(listen: Make, tmp_path: Path, comments: str) -> None:
    flags = ("--send-timeout", "0.3", "--sse-keep-alive-interval", comments)
    settings = told(tmp_path, *flags)
    said = "x" * 3000
    engine = {"per_step": 100, "delay": 0.001}
    async with listen(said, small_buffers=True, engine=engine, settings=settings) as server:
        body = b'{"prompt":"a","stream":true,"n":64,"max_tokens":3000}'
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.readline()  # and then nothing more is taken
        await asyncio.sleep(0.1)
        assert server.engine.open_ids
        await server.idle(10)
        writer.close()


async def test_template_variables_of_the_server(make: Make, tmp_path: Path) -> None:
    template = "{{ greeting }}{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = told(tmp_path, "--chat-template-kwargs", '{"greeting": "ABC"}')
    async with make("x", template=template, settings=settings) as server:
        first = (await server.chat()).json()["usage"]["prompt_tokens"]
        own = await server.chat(chat_template_kwargs={"greeting": "A"})
        assert first == own.json()["usage"]["prompt_tokens"] + 2


def test_a_template_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("OWN {{ messages[0].content }}")
    folder = tiny.make(tmp_path / "model", tiny.Spec(family="qwen3_moe", seed=1))
    config = parse("--chat-template", str(file))
    text = Text.from_checkpoint(folder, chat_template=read_template(config.chat_template))
    text.close()
    template = text.template
    assert isinstance(template, ChatTemplate)
    assert template.render([{"role": "user", "content": "hi"}], RenderOptions()) == "OWN hi"


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "No such file"), (b"", "it is empty"), (b"a\n{% if %}", r"line 2"), (b"\xff", "utf-8")],
)
def test_a_template_that_cannot_be_used(tmp_path: Path, content: bytes | None, reason: str) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"--chat-template .*own\.jinja: .*{reason}"):
        check_doors(parse("--chat-template", str(file)))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--chat-template-kwargs", "{a: 1}"], r"--chat-template-kwargs '\{a: 1\}': .*a JSON obj"),
        (["--chat-template-kwargs", "[1]"], r"--chat-template-kwargs '\[1\]': .*a JSON object"),
        (["--cors-origins", "a.example"], r"--cors-origins .*a\.example.*scheme://host"),
        (["--cors-origins", "https://a.example/x"], "--cors-origins .*without a path"),
        (["--cors-origins", "https://a.example:x"], "--cors-origins .*without a path"),
        (["--sse-keep-alive-interval", "-1"], r"--sse-keep-alive-interval '-1': .*equal to 0"),
        (["--send-timeout", "0"], r"--send-timeout '0': .*greater than 0"),
        (["--send-timeout", "inf"], r"--send-timeout 'inf': .*finite"),
    ],
)
def test_bad_values_name_the_flag(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*words)


def test_the_environment_and_files_spell_them_too(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("chat-template-kwargs: {a: 1}\ncors-origins: https://a.example\ndocs: no\n")
    config = load({"config": str(file)}, {"MOESTRO_CHAT_TEMPLATE_KWARGS": '{"b": 2}'})
    assert config.chat_template_kwargs == {"b": 2}
    assert (config.cors_origins, config.docs) == (("https://a.example",), False)
    assert Config.from_json(config.to_json()) == config
