"""`moestro serve`: the two processes' life, from the first check to the last stream.

Owns: the order of start and stop, the signals, the listening socket, what is printed. Does not
own what is answered (`server.app`) nor how the engine runs (`engine.handle`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket

import uvicorn
import uvloop

from moestro import log
from moestro.config import Config
from moestro.engine.handle import EngineHandle
from moestro.errors import ConfigError, EngineDead
from moestro.server.app import create_app
from moestro.server.auth import hash_key
from moestro.server.cli_model import Model, resolve
from moestro.server.cli_show import TICK, memory_table, show_loading
from moestro.server.cli_stop import HttpServer, Stop, on_hangup
from moestro.server.doors import read_template, tls_options
from moestro.server.engine_port import DEAD, READY
from moestro.server.otel import Tracing
from moestro.server.pages import VERSION
from moestro.server.settings import GenerationDefaults, ServerSettings, serve_options
from moestro.server.text import Text
from moestro.server.tools_choose import model_type


def serve(config: Config) -> int:
    """Serve until a signal asks to stop. Returns 0, or raises the MoestroError that ended it."""
    log.setup(config.log_level, form=config.log_format)
    model = resolve(config)
    with (
        listen(config.host, config.port) as door,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(_serve(config, model, door))
    return 0


def server_settings(config: Config, model: Model) -> ServerSettings:
    """The HTTP side's part of the settings; of the keys only digests."""
    return ServerSettings(
        served_model_names=model.names,
        model_path=str(model.path),
        api_key_hashes=tuple(hash_key(key) for key in config.api_key),
        api_key_file=config.api_key_file,
        rate_limit=config.rate_limit,
        request_timeout=config.request_timeout,
        max_num_seqs=config.max_num_seqs,
        max_num_batch_seqs=config.max_num_batch_seqs,
        files_dir=config.files_dir,
        max_file_size=config.max_file_size,
        files_quota=config.files_quota,
        defaults=GenerationDefaults.from_checkpoint(model.path),
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        model_type=model_type(model.path),
        chat_template_kwargs=config.chat_template_kwargs or {},
        accept_any_model=config.accept_any_model,
        cors_origins=config.cors_origins,
        docs=config.docs,
        max_request_body=config.max_request_body,
        send_timeout=config.send_timeout,
        ping_interval=config.sse_keep_alive_interval,
        metrics_prefix=config.metrics_prefix,
        log_requests=config.log_requests,
    )


async def _serve(config: Config, model: Model, door: socket.socket) -> None:
    engine = EngineHandle(config, model.path)
    try:
        await engine.start()
        # The engine's process loads weights while this one loads the tokenizer.
        template = read_template(config.chat_template)
        text = await asyncio.to_thread(Text.from_checkpoint, model.path, chat_template=template)
        async with contextlib.AsyncExitStack() as closing:
            closing.callback(text.close)
            tracing = None
            if config.otlp_endpoint is not None:
                tracing = Tracing.to(config.otlp_endpoint, model.names[0], VERSION)
                closing.push_async_callback(asyncio.to_thread, tracing.close)
            settings = server_settings(config, model)
            app = create_app(settings, engine, text, config=config, tracing=tracing)
            # A lifespan would be cancelled, with a traceback, by a second signal; its tasks, to
            # close the text and to stop batches, are done here.
            options = serve_options() | tls_options(config) | {"lifespan": "off"}
            server = HttpServer(uvicorn.Config(app, **options))
            stop = Stop(server, app.state.lifecycle.drain, config.shutdown_timeout)
            reload = app.state.keys.reload if config.api_key_file else None
            with stop.on_signals(), on_hangup(reload):
                async with app.state.batches or contextlib.nullcontext():
                    await _answer(engine, server, stop, model, door)
    finally:
        await engine.aclose()


async def _answer(
    engine: EngineHandle, server: HttpServer, stop: Stop, model: Model, door: socket.socket
) -> None:
    """Answer from now on, with 503 while the model loads, until a stop or the engine's end."""
    serving = asyncio.create_task(server.serve(sockets=[door]))
    stopping = asyncio.create_task(stop.run())
    try:
        if await until_ready(engine, serving):
            gc.freeze()  # what exists now stays; the collector's full passes would delay streams
            announce(engine, model, door, "https" if server.config.is_ssl else "http")
            await until_over(engine, serving, stop)
    finally:
        server.should_exit = True
        await serving
        stopping.cancel()


async def until_ready(engine: EngineHandle, serving: asyncio.Task[None]) -> bool:
    """Show the loading; False when the server was stopped meanwhile. Raises what ended it."""
    showing = asyncio.create_task(show_loading(lambda: engine.progress))
    try:
        while engine.state not in (READY, DEAD) and not serving.done():
            await asyncio.sleep(TICK)
    finally:
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing
    _raise_if_dead(engine)
    return engine.state == READY


async def until_over(engine: EngineHandle, serving: asyncio.Task[None], stop: Stop) -> None:
    """Wait for the server's end. Raises what ended the engine, once live requests know of it."""
    while not serving.done():
        if engine.state == DEAD and not stop.asked:
            stop.ask()
            await serving
            _raise_if_dead(engine)
        await asyncio.sleep(TICK)


def _raise_if_dead(engine: EngineHandle) -> None:
    if engine.state == DEAD:
        raise engine.failure or EngineDead(engine.error or "the engine has ended")


def announce(engine: EngineHandle, model: Model, door: socket.socket, scheme: str) -> None:
    """Print where memory went and where to send requests."""
    info = engine.info
    if info is not None:
        print(memory_table(info.memory, info.notes))
    host, port = door.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"Moestro is ready on {scheme}://{shown}:{port} (model {model.names[0]})", flush=True)


def listen(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises ConfigError that says why it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address, family=family, backlog=serve_options()["backlog"])
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {host}:{port}: {reason}; --port and --host choose another place",
            param="port",
        ) from None
