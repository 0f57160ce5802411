"""TLS: a real handshake, and files that are refused before a model is loaded."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
import uvicorn

from moestro.config import Config
from moestro.errors import ConfigError
from moestro.server import cli
from moestro.server.cli_stop import HttpServer
from moestro.server.doors import check_tls, tls_options
from moestro.server.settings import serve_options
from tests.server.conftest import Setup, saying

PASSWORD = "pass-word"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs of certificate and key, and the first key encrypted."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl")
    folder = tmp_path_factory.mktemp("tls")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    for name in ("a", "b"):
        names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        openssl(*new.split(), *names, "-keyout", f"{name}.key", "-out", f"{name}.pem")
    openssl("ec", "-aes256", "-passout", f"pass:{PASSWORD}", "-in", "a.key", "-out", "locked.key")
    (folder / "both.pem").write_text(
        (folder / "a.pem").read_text() + (folder / "a.key").read_text()
    )
    (folder / "text").write_text("not PEM")
    return folder


def config(folder: Path, certificate: str, key: str | None, password: str | None = None) -> Config:
    return Config(
        ssl_certfile=folder / certificate,
        ssl_keyfile=folder / key if key else None,
        ssl_keyfile_password=password,
    )


@pytest.mark.parametrize(
    "files", [("a.pem", "a.key"), ("both.pem", None), ("a.pem", "locked.key", PASSWORD)]
)
async def test_a_client_that_trusts_the_certificate(
    folder: Path, files: tuple[str, str, str | None]
) -> None:
    chosen = config(folder, *files)
    check_tls(chosen)
    app, engine = Setup(saying("hello"), settings={"docs": False}).build()
    await engine.start()
    options = serve_options() | tls_options(chosen) | {"timeout_graceful_shutdown": 1}
    server = HttpServer(uvicorn.Config(app, **options))
    assert server.config.is_ssl
    with socket.create_server(("127.0.0.1", 0)) as door:
        task = asyncio.create_task(server.serve(sockets=[door]))
        port = door.getsockname()[1]
        trust = ssl.create_default_context(cafile=str(folder / "a.pem"))
        async with httpx.AsyncClient(verify=trust, base_url=f"https://127.0.0.1:{port}") as client:
            body = {"prompt": "hi", "stream": True}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200
            assert response.text.endswith("data: [DONE]\n\n")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as plain:
            with pytest.raises(httpx.RemoteProtocolError):
                await plain.get("/health")
        server.should_exit = True
        await task
    await engine.aclose()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("none.pem", "a.key"), r"--ssl-certfile .*none\.pem: No such file"),
        (("a.pem", "none.key"), r"--ssl-keyfile .*none\.key: No such file"),
        (("a.pem", "b.key"), r"--ssl-certfile .*--ssl-keyfile .*b\.key: the key is not this"),
        (("a.pem", None), r"--ssl-certfile .*a\.pem \(no --ssl-keyfile\): not PEM"),
        (("text", "a.key"), r"--ssl-certfile .*text .*: not PEM"),
        (("a.pem", "text"), r"--ssl-keyfile .*text: not PEM"),
        (("a.pem", "locked.key"), "--ssl-keyfile-password"),
        (("a.pem", "locked.key", "wrong-word"), "--ssl-keyfile-password"),
    ],
)
def test_files_that_cannot_be_used(
    folder: Path, files: tuple[str, str, str | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_tls(config(folder, *files))
    assert "wrong-word" not in caught.value.message


def test_a_key_without_a_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--ssl-keyfile", "--ssl-keyfile-password"):
        assert cli.main(["serve", flag, "x"]) == 2
        assert f"{flag} needs --ssl-certfile" in capsys.readouterr().err


def test_the_password_is_never_shown() -> None:
    chosen = Config(ssl_keyfile_password=PASSWORD)
    assert PASSWORD not in repr(chosen)
    assert PASSWORD not in chosen.to_json()
