"""The command line without an engine: flags, verbs, exit codes, finding a model, printing."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import signal
from pathlib import Path

import pytest

from moestro import __version__, log
from moestro.config import Config, load
from moestro.errors import ConfigError, ModelError
from moestro.server import cli, cli_check, cli_model
from moestro.server.cli_flags import config_flags, config_parser
from moestro.server.cli_serve import listen, server_settings
from moestro.server.cli_show import memory_table, show_loading, show_size
from moestro.server.cli_stop import HttpServer, Stop
from moestro.server.doors import is_loopback, refuse_open_door


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith("MOESTRO_")]:
        monkeypatch.delenv(name)


def parse(*words: str) -> Config:
    return load(config_flags(config_parser("moestro serve", ""), words), {})


# --- flags ----------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["X"], ["--model", "X"], ["--model=X"], ["X", "--model", "X"]])
def test_the_model_may_be_a_word_or_a_flag(words: list[str]) -> None:
    assert parse(*words).model == "X"


def test_the_model_may_stand_after_flags() -> None:
    config = parse("--port", "1", "X", "--no-enable-prefix-caching")
    assert (config.model, config.port, config.enable_prefix_caching) == ("X", 1, False)


def test_dashes_and_underscores_are_the_same() -> None:
    assert parse("--gpu_memory", "1g", "--max_num-seqs=3").max_num_seqs == 3
    assert parse("--enable_prefix_caching").enable_prefix_caching is True
    assert parse("--served-model-name=my_model").served_model_name == ("my_model",)


def test_a_flag_with_several_values() -> None:
    config = parse("--served-model-name", "a", "b", "--api-key", "k", "--served-model-name", "c")
    assert config.served_model_name == ("a", "b", "c")
    assert config.api_key == ("k",)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu-memry", "24GiB"], r"unknown flag --gpu-memry \(did you mean --gpu-memory\?\)"),
        (["--gpu_memry=1"], r"unknown flag --gpu-memry .*--gpu-memory"),
        (["--gpu"], "unknown flag --gpu"),
        (["-x"], "unknown flag -x"),
        (["--port"], "--port"),
        (["--port", "many"], r"--port 'many': should be a valid integer"),
        (["--gpu-memory", "lots"], r"--gpu-memory 'lots': should be a number of bytes"),
        (["--device", "tpu"], r"--device 'tpu': should be 'auto', 'cpu' or 'cuda'"),
        (["A", "B"], "one model at a time, not A and B"),
        (["A", "--model", "B"], "two models: A and --model B"),
    ],
)
def test_bad_flags(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*words)


def test_every_setting_has_a_flag_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert [n for n in Config.model_fields if "--" + n.replace("_", "-") not in text] == []


# --- verbs and exit codes -------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"moestro {__version__}\n"


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in cli.VERBS)
    assert cli.main([]) == 2
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sevre"], "unknown verb sevre (did you mean serve?)"),
        (["serve", "--prot", "1"], "unknown flag --prot (did you mean --port?)"),
        (["serve", "--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in"),
        (["check", "--device", "tpu"], "--device 'tpu'"),
    ],
)
def test_a_wrong_command_line_is_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


def test_a_failure_is_1_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "./no-such-folder"]) == 1
    error = capsys.readouterr().err
    assert error == "moestro: no directory ./no-such-folder, and that is no hub id\n"


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.VERBS, "serve", lambda words: interrupted)
    assert cli.main(["serve"]) == 130


# --- who may connect ------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_this_machine_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    refuse_open_door(Config(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "no-such-host.invalid"])
def test_a_wider_address_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        refuse_open_door(Config(host=host))
    refuse_open_door(Config(host=host, api_key=("k",)))
    refuse_open_door(Config(host=host, allow_unauthenticated=True))


def test_a_port_in_use_says_so() -> None:
    with listen("127.0.0.1", 0) as door:
        port = door.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: Address already in use"):
            listen("127.0.0.1", port)


def test_the_server_knows_keys_only_as_digests(tmp_path: Path) -> None:
    config = Config(api_key=("sesame",), max_request_body=5, metrics_prefix="vllm:")
    settings = server_settings(config, cli_model.Model(tmp_path, ("a", "b")))
    assert "sesame" not in repr(settings)
    assert len(settings.api_key_hashes) == 1
    assert settings.served_model_names == ("a", "b")
    assert (settings.max_request_body, settings.metrics_prefix) == (5, "vllm:")


# --- finding a model ------------------------------------------------------------------------


def checkpoint(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def test_a_directory(tmp_path: Path) -> None:
    checkpoint(tmp_path, "config.json", "model.safetensors")
    model = cli_model.resolve(Config(model=str(tmp_path)))
    assert model == cli_model.Model(tmp_path, (str(tmp_path),))
    named = cli_model.resolve(Config(model=str(tmp_path), served_model_name=("a", "b")))
    assert named.names == ("a", "b")


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    checkpoint(tmp_path, "config.json")
    assert cli_model.resolve(Config(model=str(tmp_path), load_format="dummy")).path == tmp_path


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"has no config\.json"),
        (["config.json"], "has no safetensors files"),
        (["config.json", "pytorch_model.bin"], r"only as pytorch_model\.bin.*convert"),
        (["config.json", "a.pt"], r"only as a\.pt"),
    ],
)
def test_directories_that_are_no_checkpoint(tmp_path: Path, names: list[str], message: str) -> None:
    checkpoint(tmp_path, *names)
    with pytest.raises(ModelError, match=message):
        cli_model.resolve(Config(model=str(tmp_path)))


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match="is a file"):
        cli_model.resolve(Config(model=str(tmp_path / "model.gguf")))


def test_a_revision_belongs_to_a_hub_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="revision"):
        cli_model.resolve(Config(model=str(tmp_path), revision="main"))


def test_a_hub_model_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def refuse(repo: str, **options: object) -> str:
        asked.update(options, repo=repo)
        raise OSError("we are offline\nand more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    message = r"cannot get model a/b: .*no directory.*HF_HUB_OFFLINE.*answered: we are offline$"
    with pytest.raises(ModelError, match=message):
        cli_model.resolve(Config(model="a/b", revision="v1"))
    assert (asked["repo"], asked["revision"]) == ("a/b", "v1")
    assert not any("bin" in str(pattern) for pattern in asked["allow_patterns"])  # type: ignore[attr-defined]


def test_a_hub_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    checkpoint(tmp_path, "config.json", "model.safetensors")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *a, **k: str(tmp_path))
    assert cli_model.resolve(Config(model="a/b")) == cli_model.Model(tmp_path, ("a/b",))


# --- what is printed ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (24 * 2**30, "24.0 GiB"),
        (2**50, "1024.0 TiB"),
    ],
)
def test_show_size(count: int, text: str) -> None:
    assert show_size(count) == text


def test_memory_table() -> None:
    table = memory_table({"dense weights": 2**20, "KV cache": 512}, ["slots hold a quarter"])
    assert table.splitlines() == [
        "Memory",
        "  dense weights     1.0 MiB",
        "  KV cache            512 B",
        "  note: slots hold a quarter",
    ]


async def shown(steps: list[tuple[str, int, int]], out: io.StringIO) -> str:
    left = list(steps)
    task = asyncio.create_task(show_loading(lambda: left.pop(0) if len(left) > 1 else left[0], out))
    while len(left) > 1:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.15)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return out.getvalue()


async def test_loading_in_plain_lines() -> None:
    steps = [("experts", 0, 2048), ("experts", 1, 2048), ("experts", 1024, 2048), ("warm up", 0, 0)]
    text = await shown(steps, io.StringIO())
    assert text == "experts: 0% of 2.0 KiB\nexperts: 50% of 2.0 KiB\nwarm up\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_loading_as_a_bar() -> None:
    text = await shown([("experts", 512, 2048), ("experts", 1024, 2048)], Terminal())
    assert "experts" in text
    assert "1.0 KiB of 2.0 KiB" in text


def test_machine_report() -> None:
    facts = cli_check.machine()
    assert facts["moestro"] == __version__
    assert "cores" in facts["cpu"]
    assert "GiB" in facts["memory"]
    assert "torch 2" in facts["python"]


def test_kernel_table() -> None:
    table = cli_check.kernel_table({"experts": ("torch", "the CPU"), "norm": ("torch", "why")})
    assert table == "Kernels\n  experts  torch: the CPU\n  norm     torch: why"


def test_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        out = io.StringIO()
        log.setup("info", "engine", out)
        logging.getLogger("moestro.x").info("hello %d", 1)
        logging.getLogger("moestro.x").debug("unseen")
        logging.getLogger("httpx").info("unseen")
        assert out.getvalue().split(" ", 1)[1] == "info engine hello 1\n"
    finally:
        root.handlers[:] = before
        root.setLevel(level)


# --- stopping -------------------------------------------------------------------------------


class Drained:
    def __init__(self) -> None:
        self.grace: float | None = None
        self.finish = asyncio.Event()

    async def drain(self, grace: float) -> bool:
        self.grace = grace
        await self.finish.wait()
        return True


def stoppable() -> tuple[Stop, HttpServer, Drained]:
    import uvicorn

    async def app(scope: object, receive: object, send: object) -> None:
        raise AssertionError("not called")

    server, drained = HttpServer(uvicorn.Config(app, log_config=None)), Drained()
    return Stop(server, drained.drain, 3.0), server, drained


async def test_the_first_signal_drains_and_then_ends() -> None:
    stop, server, drained = stoppable()
    with stop.on_signals():
        task = asyncio.create_task(stop.run())
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        assert (drained.grace, server.should_exit) == (3.0, False)
        drained.finish.set()
        await task
    assert (server.should_exit, server.force_exit) == (True, False)


async def test_the_second_signal_ends_at_once() -> None:
    stop, server, _ = stoppable()
    with stop.on_signals():
        task = asyncio.create_task(stop.run())
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
    task.cancel()
    assert (server.should_exit, server.force_exit) == (True, True)


def test_signals_are_given_back() -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# --- simulate -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one trace file, not 0"),
        (["a", "b"], "one trace file, not 2"),
        (["./no-such-trace"], "no trace file no-such-trace"),
        (["t", "--slots", "many"], "'many' should be a count or a percentage"),
        (["t", "--policy", "lrru"], "invalid choice: 'lrru'"),
        (["t", "--polcy", "lru"], "unknown flag --polcy (did you mean --policy?)"),
        (["t", "--link", "0"], "more than 0"),
        (["t", "--link", "fast"], "number of bytes"),
        (["t", "--batch", "0"], "at least 1"),
    ],
)
def test_bad_simulations(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *words]) == 2
    assert message in capsys.readouterr().err


def test_simulate_hands_on_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        "moestro.expert_cache.simulate.main", lambda *a, **k: asked.append((a, k)) or 0
    )
    trace = tmp_path / "t"
    trace.touch()
    words = ["simulate", "--policy", "lru", "lfu", "--slots", "10%", "8", "--link", "1GB"]
    assert cli.main([*words, "--json", "--", str(trace)]) == 0
    assert cli.main(["simulate", str(trace), "--batch", "4", "--expert-size", "1KiB"]) == 0
    assert asked == [
        ((trace, ["lru", "lfu"], ["10%", "8"], 10**9, True), {"batch": None, "expert_bytes": None}),
        (
            (trace, ["all"], ["5%", "10%", "25%", "50%", "75%"], 25 * 10**9, False),
            {"batch": 4, "expert_bytes": 1024},
        ),
    ]


# --- the demo -------------------------------------------------------------------------------


def test_without_a_model_it_is_the_demo() -> None:
    model = cli_model.resolve(Config())
    assert model.names == ("moestro-demo",)
    assert (model.path / "config.json").is_file()
    assert sum(p.stat().st_size for p in model.path.iterdir()) < 20 * 2**20


def test_check_reports_machine_memory_and_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    before = logging.getLogger().handlers[:]
    try:
        assert cli.main(["check", "--config", "cpu-demo"]) == 0
    finally:
        logging.getLogger().handlers[:] = before
    report = capsys.readouterr().out
    for word in ("moestro   ", "cpu   ", "moestro-demo", "expert slots", "Kernels", "rms_norm"):
        assert word in report
