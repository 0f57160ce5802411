"""Config: its values, its sources and their order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moestro.config import PRESETS, Config, load
from moestro.config_values import parse_size
from moestro.errors import ConfigError

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * GIB),
        ("24gib", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("24 gb", 24 * 10**9),
        ("1.5g", 3 * GIB // 2),
        ("1.5G", 3 * GIB // 2),
        ("0.1KB", 100),
        ("512k", 512 * 1024),
        ("7b", 7),
        ("12345", 12345),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert load({"gpu_memory": text}, {}).gpu_memory == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1.5.2g", "1e9", "24XB", "24iB", "nan", "1 2"])
def test_bad_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="number of bytes"):
        parse_size(text)


@pytest.mark.parametrize("value", [True, 0, -1, "0GiB", 1.5, [1]])
def test_values_that_are_no_size(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"host_memory": value}, {})
    assert caught.value.param == "host_memory"


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 2**60))
def test_a_plain_number_is_bytes(count: int) -> None:
    assert parse_size(str(count)) == count


def test_defaults() -> None:
    config = load({}, {})
    assert config == Config()
    assert (config.model, config.host, config.port) == ("", "127.0.0.1", 8000)
    assert config.gpu_memory is None
    assert config.max_request_body == 32 * 2**20


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Config().port = 1  # type: ignore[misc]


def test_every_field_is_described() -> None:
    lacking = [n for n, f in Config.model_fields.items() if not (f.description or "").endswith(".")]
    assert lacking == []


def test_order_of_the_sources(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('port = 1\nseed = 1\nmax-num-seqs = 1\nserved-model-name = ["a", "b"]\n')
    config = load(
        {"config": str(file), "port": "3"}, {"MOESTRO_PORT": "2", "MOESTRO_SEED": "2", "HOME": "/x"}
    )
    assert (config.port, config.seed, config.max_num_seqs) == (3, 2, 1)
    assert config.served_model_name == ("a", "b")
    assert config.config == file


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"port": 5}')
    assert load({}, {"MOESTRO_CONFIG": str(file)}).port == 5


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", 'gpu_memory = "1GiB"\nenable_prefix_caching = false\nshutdown_timeout = 1'),
        ("c.yaml", "gpu-memory: 1GiB\nenable-prefix-caching: no\nshutdown_timeout: 1\n"),
        ("c.yml", "gpu_memory: 1073741824\nenable_prefix_caching: false\nshutdown_timeout: 1.0"),
        (
            "c.json",
            '{"gpu_memory": "1GiB", "enable_prefix_caching": false, "shutdown_timeout": 1}',
        ),
    ],
)
def test_file_formats(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    config = load({"config": str(tmp_path / name)}, {})
    assert config.gpu_memory == GIB
    assert config.enable_prefix_caching is False
    assert config.shutdown_timeout == 1.0


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing\n")
    config = load({"config": str(tmp_path / "c.yaml")}, {})
    assert config.model_copy(update={"config": None}) == Config()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.toml", "prot = 1", r"unknown key prot .*did you mean port\?"),
        ("c.toml", "gpu-memory = 1\ngpu_memory = 2", "twice"),
        ("c.toml", "port = ", "cannot read"),
        ("c.yaml", "- 1", "names and values"),
        ("c.yaml", "a: [", "cannot read"),
        ("c.json", "{", "cannot read"),
        ("c.ini", "", "must end in"),
        ("c.toml", 'config = "other.toml"', "unknown key config"),
        ("c.toml", "port = 70000", r"port in .*c.toml 70000: should be less than"),
        ("c.toml", 'served_model_name = [""]', "at least 1 character"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load({"config": str(tmp_path / name)}, {})


def test_a_missing_file_names_the_presets() -> None:
    with pytest.raises(ConfigError, match=r"presets: .*cpu-demo"):
        load({"config": "/nowhere/c.toml"}, {})


@pytest.mark.parametrize("preset", sorted(p.stem for p in PRESETS.glob("*.toml")))
def test_presets_load_by_name(preset: str) -> None:
    assert load({"config": preset}, {}) != Config()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"MOESTRO_GPU_MEMROY": "1"}, r"unknown .*did you mean MOESTRO_GPU_MEMORY\?"),
        ({"MOESTRO_PORT": "tcp://10.0.0.1:8000"}, "enableServiceLinks"),
        ({"MOESTRO_SERVICE_HOST": "10.0.0.1"}, "enableServiceLinks"),
        ({"MOESTRO_PORT": "many"}, r"MOESTRO_PORT 'many': should be"),
        ({"MOESTRO_DEVICE": "gpu"}, r"MOESTRO_DEVICE 'gpu': should be 'auto', 'cpu' or 'cuda'"),
    ],
)
def test_bad_environment(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load({}, environ)


def test_environment_values() -> None:
    config = load(
        {},
        {
            "MOESTRO_API_KEY": "one, two",
            "MOESTRO_ENABLE_PREFIX_CACHING": "false",
            "MOESTRO_TRACE": "/tmp/t",
            "MOESTRO_MODEL": "",
            "MOESTRO_GPU_MEMORY": "auto",
            "PATH": "x",
        },
    )
    assert config.api_key == ("one", "two")
    assert config.enable_prefix_caching is False
    assert config.trace == Path("/tmp/t")
    assert config.model == ""
    assert config.gpu_memory is None


@pytest.mark.parametrize("name", ["gpu_memory", "expert_slots", "kv_cache_tokens", "threads"])
def test_auto_means_automatic(name: str) -> None:
    assert getattr(load({name: "auto"}, {}), name) is None


def test_keys_are_never_shown() -> None:
    config = load({"api_key": ["sesame"]}, {})
    assert "sesame" not in repr(config)
    assert "sesame" not in str(config)
    assert "sesame" not in config.to_json()
    with pytest.raises(ConfigError) as caught:
        load({"api_key": {"sesame": 1}}, {})
    assert "sesame" not in caught.value.message


def test_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"max_num_sqs .*max_num_seqs"):
        load({"max_num_sqs": 1}, {})


def test_round_trip(tmp_path: Path) -> None:
    config = load(
        {"gpu_memory": "1.5g", "trace": str(tmp_path / "t"), "served_model_name": ["a", "b"]}, {}
    )
    assert Config.from_json(config.to_json()) == config
    assert json.loads(config.to_json())["gpu_memory"] == 3 * GIB // 2
