"""What the command line checks and reads before a model is loaded.

Owns: files that flags of the HTTP side name, and who may connect. Does not own what is done with
them later: `auth` has keys, `template` chat templates.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
from pathlib import Path
from typing import Any

import jinja2

from moestro.config import Config
from moestro.errors import ConfigError
from moestro.server.keys import read_keys
from moestro.server.otel import check_endpoint
from moestro.server.template import environment


def check_doors(config: Config) -> None:
    """Raise ConfigError, which names the flag, for what could only fail after the loading."""
    refuse_open_door(config)
    check_batch_seqs(config)
    check_endpoint(config.otlp_endpoint)
    if config.api_key_file is not None:
        read_keys(config.api_key_file)
    check_tls(config)
    read_template(config.chat_template)


def refuse_open_door(config: Config) -> None:
    """Raise ConfigError when other machines could use the model without a key."""
    keys = config.api_key or config.api_key_file
    if keys or config.allow_unauthenticated or is_loopback(config.host):
        return
    raise ConfigError(
        f"--host {config.host} lets other machines in: set --api-key or --api-key-file, or "
        "--allow-unauthenticated to let anyone use the model",
        param="host",
    )


def check_batch_seqs(config: Config) -> None:
    """Raise ConfigError when batches are to have more sequences than there are."""
    batch, seqs = config.max_num_batch_seqs, config.max_num_seqs
    if batch is not None and batch > seqs:
        raise ConfigError(
            f"--max-num-batch-seqs {batch}: more than --max-num-seqs {seqs}",
            param="max_num_batch_seqs",
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. False for a name that cannot be looked up."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(str(entry[4][0])).is_loopback for entry in found)


def read_template(path: Path | None) -> str | None:
    """The source of the chat template that replaces the checkpoint's. Raises ConfigError."""
    if path is None:
        return None
    try:
        source = path.read_text(encoding="utf-8")
        if not source.strip():
            raise ValueError("it is empty")
        environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        reason = f"{error.message} (line {error.lineno})"
    except OSError as error:
        reason = error.strerror or str(error)
    except ValueError as error:
        reason = str(error)
    else:
        return source
    raise ConfigError(f"--chat-template {path}: {reason}", param="chat_template")


def tls_options(config: Config) -> dict[str, Any]:
    """What uvicorn is told about TLS."""
    if config.ssl_certfile is None:
        return {}
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_keyfile_password": config.ssl_keyfile_password,
    }


def check_tls(config: Config) -> None:
    """Raise ConfigError, which names the flag, unless the TLS files can be used as they are."""
    certificate, key = config.ssl_certfile, config.ssl_keyfile
    if certificate is None:
        for flag, value in (("file", key), ("file-password", config.ssl_keyfile_password)):
            if value is not None:
                raise ConfigError(f"--ssl-key{flag} needs --ssl-certfile", param="ssl_certfile")
        return
    _check_readable("--ssl-certfile", certificate)
    if key is not None:
        _check_readable("--ssl-keyfile", key)
    try:
        # The password is always given: without one OpenSSL would ask for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            certificate, key, password=lambda: config.ssl_keyfile_password or ""
        )
    except (ssl.SSLError, ValueError, OSError) as error:
        named = f" with --ssl-keyfile {key}" if key else " (no --ssl-keyfile)"
        raise ConfigError(
            f"--ssl-certfile {certificate}{named}: {_tls_reason(error)}", param="ssl_certfile"
        ) from None


def _check_readable(flag: str, path: Path) -> None:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from None


def _tls_reason(error: Exception) -> str:
    reason = (getattr(error, "reason", None) or "").replace("_", " ").lower()
    if "mismatch" in reason:
        return "the key is not this certificate's"
    hint = "not PEM, or the key needs another --ssl-keyfile-password"
    return f"{hint} ({reason})" if reason else hint
