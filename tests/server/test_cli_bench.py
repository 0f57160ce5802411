"""`moestro bench` in this process: its flags, its refusals, its table and its JSON."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moestro.engine.bench_figures import Load
from moestro.errors import ConfigError
from moestro.server import cli, cli_bench_report
from moestro.server.cli_bench_engine import check_load
from moestro.server.cli_bench_flags import OF_THE_SERVER
from moestro.server.cli_bench_show import seconds


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No settings from outside, no look at the machine, and logging as it was."""
    for name in [n for n in os.environ if n.startswith("MOESTRO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(cli_bench_report, "machine", lambda: {"cpu": "a test's"})
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


QUICK = ("--load-format", "dummy", "--input-len", "6", "--output-len", "8", "--link-gbps", "2")


def bench(*words: str) -> int:
    return cli.main(["bench", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "bench needs a kind: latency, throughput, serve, link"),
        (["latancy"], "unknown benchmark latancy (did you mean latency?)"),
        (["latency", "--btach", "1"], "unknown flag --btach (did you mean --batch?)"),
        (["latency", "--batch", "0"], "'0' should be a count, at least 1"),
        (["latency", "--batch-sizes", "1"], "unknown flag --batch-sizes"),
        (["throughput", "--batch-sizes", "1,x"], "'x' should be a count"),
        (["latency", "--keep", "0.5"], "--keep needs a --routing"),
        (["latency", "--routing", "uniform", "--keep", "2"], "'2' should be from 0 to 1"),
        (["latency", "--routing", "zipf:x"], "exponent of zipf"),
        (["latency", "--routing", "replay:./none"], "no trace file none"),
        (["latency", "--link-gbps", "0"], "more than 0"),
        (["latency", "--json", "./none/x.json"], "no directory none for the result"),
        (["latency", "--port", "1"], "--port is a setting of moestro serve, not of bench"),
        (["latency", "--device", "tpu"], "--device 'tpu'"),
        (["latency", "A", "B"], "one model at a time"),
        (["link", "--size", "0"], "more than 0"),
        (["link", "--file", "./none"], "no file none"),
        (["link", "--dir", "./none"], "no directory none"),
        (["link", "x"], "takes flags only, not x"),
    ],
)
def test_bad_command_lines(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*words) == 2
    assert message in capsys.readouterr().err


def test_help_lists_the_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("--help") == 0
    text = capsys.readouterr().out
    assert all(f"  {kind} " in text for kind in ("latency", "throughput", "serve", "link"))
    for kind in ("latency", "throughput", "serve", "link"):
        with pytest.raises(SystemExit) as caught:
            bench(kind, "--help")
        assert caught.value.code == 0
        assert "--json" in capsys.readouterr().out


def test_server_settings_exist() -> None:
    from moestro.config import Config

    assert set(Config.model_fields) >= OF_THE_SERVER


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (Load(1, 60, 41), r"--input-len 60 and --output-len 41 make 101 tokens.*context is 100"),
        (Load(9, 10, 10), r"a batch of 9 is more than --max-num-seqs, 8"),
        (Load(8, 50, 50), r"8 with 100 tokens each is 800 tokens.*KV cache holds 640"),
    ],
)
def test_loads_that_do_not_fit(load: Load, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_load(load, 8, 100, 640)
    check_load(Load(8, 40, 40), 8, 100, 640)


def test_what_does_not_fit_is_refused_before_loading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loaded(*args: object, **more: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("moestro.engine.bench.measure", loaded)
    assert bench("latency", "--load-format", "dummy", "--input-len", "99999") == 1
    assert "99999 and --output-len 128 make 100127 tokens" in capsys.readouterr().err


# --- a run ----------------------------------------------------------------------------------

SPREAD = {"mean", "p50", "p90", "p99", "max", "count"}
CACHE = {
    "slot_hits",
    "misses",
    "miss_share",
    "from_host",
    "from_disk",
    "staged",
    "host_bytes",
    "disk_bytes",
    "exposed_seconds",
}
PHASE = {"seconds", "tokens", "tokens_per_second", "steps", "step_seconds", "cache"}
BOUND = {
    "step_seconds",
    "floor_seconds",
    "floor_measured",
    "floor_steps",
    "bytes_per_step",
    "link_bytes_per_second",
    "link_source",
    "bound_seconds",
    "share",
}


def check_result(one: dict[str, Any]) -> None:
    """One entry of `results` has every name, and its numbers agree with each other."""
    assert set(one["prefill"]) == PHASE | {"time_to_first_token"}
    assert set(one["decode"]) == PHASE | {"gap"}
    assert set(one["prefill"]["time_to_first_token"]) == set(one["decode"]["gap"]) == SPREAD
    for phase in (one["prefill"], one["decode"]):
        assert set(phase["cache"]) == CACHE
        cache = phase["cache"]
        assert cache["misses"] == cache["from_host"] + cache["from_disk"]
        assert phase["tokens_per_second"] == pytest.approx(phase["tokens"] / phase["seconds"])
    found = one["bound"]
    assert set(found) == BOUND
    assert found["link_bytes_per_second"] == 2e9
    moved = found["bytes_per_step"] / found["link_bytes_per_second"]
    assert found["bound_seconds"] == pytest.approx(found["floor_seconds"] + moved)
    assert found["share"] == pytest.approx(found["bound_seconds"] / found["step_seconds"])


def test_latency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    words = ("--routing", "zipf:1", "--keep", "0.5", "--expert-slots", "48", "--json", str(path))
    assert bench("latency", *QUICK, *words, "--batch", "2", "--seed", "3") == 0
    result = json.loads(path.read_text())
    assert (result["bench"], result["schema"], result["model"]) == ("latency", 1, "moestro-demo")
    assert result["machine"] == {"cpu": "a test's"}
    assert result["settings"] == {"load_format": "dummy", "expert_slots": 48, "seed": 3}
    assert result["synthetic"] == {"routing": "zipf:1", "keep": 0.5, "scramble": True, "seed": 3}
    assert (result["slots"], result["experts"]) == (48, 192)
    (one,) = result["results"]
    check_result(one)
    shape = {name: one[name] for name in ("batch", "input_len", "output_len", "repeat", "warmup")}
    assert shape == {"batch": 2, "input_len": 6, "output_len": 8, "repeat": 3, "warmup": 1}
    assert one["prefill"]["tokens"] == 3 * 2 * 6
    assert one["prefill"]["time_to_first_token"]["count"] == 3 * 2
    assert one["decode"]["tokens"] == one["decode"]["gap"]["count"] == 3 * 2 * 7
    text = capsys.readouterr().out
    assert "ROUTING OVERRIDDEN: decode steps are routed by zipf:1, keep 0.5, seed 3" in text
    assert "token ids are scrambled" in text
    for row in ("Prefill", "first token p50", "Decode", "token gap p50", "share reached", "~|link"):
        assert any(part in text for part in row.split("|"))


def test_throughput_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--batch-sizes", "1,3", "--no-scramble", "--warmup", "0", "--json", "-")
    assert bench("throughput", *QUICK, *words) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert [one["batch"] for one in result["results"]] == [1, 3]
    for one in result["results"]:
        check_result(one)
        assert one["bound"]["floor_measured"]  # all experts are resident
        assert one["decode"]["cache"]["misses"] == 0
    assert result["synthetic"]["routing"] is None
    assert "batch 3" in captured.err
    assert "OVERRIDDEN" not in captured.err
    assert "scrambled" not in captured.err


def test_only_dummy_weights_scramble_by_themselves() -> None:
    from moestro.server.cli_bench_engine import _plan
    from moestro.server.cli_bench_flags import engine_parser

    def scrambles(*words: str) -> bool:
        return _plan("latency", engine_parser("latency", ""), words, 1).synthetic.scramble

    assert scrambles("--load-format", "dummy")
    assert not scrambles("--load-format", "dummy", "--no-scramble")
    assert not scrambles()
    assert scrambles("--scramble")


def test_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert bench("link", "--dir", str(tmp_path), "--size", "1MiB", "--json", str(path)) == 0
    result = json.loads(path.read_text())
    names = [one["name"] for one in result["results"]]
    assert names == [
        "host to device",
        "device to host",
        "device memory copy",
        "launch",
        "graph node",
        "round trip",
        "memory copy",
        "disk read",
    ]
    assert all(set(one) == {"name", "value", "unit", "note"} for one in result["results"])
    assert all(one["value"] is not None or one["note"] for one in result["results"])
    assert "memory copy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "text"), [(2.5, "2.5 s"), (0.0125, "12.5 ms"), (9e-7, "0.9 us"), (0.0, "0 us")]
)
def test_times(value: float, text: str) -> None:
    assert seconds(value) == text
