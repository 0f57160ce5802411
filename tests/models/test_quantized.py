"""Quantised checkpoints: text, log-probabilities and routing are those of the dequantised model in
transformers, and what is broken or not served is named before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moestro.config import Config
from moestro.engine import build
from moestro.engine.build import describe
from moestro.engine.model_files import open_files
from moestro.engine.models.registry import load_spec
from moestro.errors import ConfigError, ModelError
from moestro.kernels import formats
from moestro.kernels.formats import Format
from moestro.kernels.packed import dequantize, quantize
from moestro.types import Request, SamplingParams
from tests.models.test_families import recorded
from tests.oracle import drive, family_golden, golden, quantized

WITHIN = 1e-4
TOKENS = 60
Made = Callable[[str], tuple[Path, Path]]
OTHERS = {"gpt-oss": quantized.make_gpt_oss, "deepseek-v3": quantized.make_deepseek}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A function: the quantised and the plain checkpoint of a scheme."""
    known: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in known:
            folder = tmp_path_factory.mktemp("quantised") / name
            if name in OTHERS:
                known[name] = OTHERS[name](folder)
            else:
                known[name] = quantized.make(folder, quantized.SCHEMES[name])
        return known[name]

    return get


def forced(tokens: list[int]) -> Request:
    return Request(
        "a", tuple(tokens), SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    )


def asked(vocab: int = 288) -> list[int]:
    draw = torch.Generator().manual_seed(5)
    return torch.randint(9, vocab, (TOKENS,), generator=draw).tolist()


@pytest.mark.parametrize("name", [*quantized.SCHEMES, *OTHERS])
def test_logprobs_and_routes(name: str, made: Made) -> None:
    packed, plain = made(name)
    model, tokens = golden.load(plain), asked()
    with family_golden.routes(model) as chosen:
        logits = golden.forward(model, tokens).log_softmax(-1)
    want = logits[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
    with drive.engine(packed, expert_slots=2, host_memory=1 << 17) as engine:
        with recorded(engine) as routes:
            output = drive.generate(engine, [forced(tokens)])["a"]
        greedy = drive.generate(engine, [drive.greedy("b", tokens, 8)])["b"].tokens
        assert engine.stats().experts.staged > 0
    assert output.prompt_logprobs is not None
    got = torch.tensor([one.logprob for one in output.prompt_logprobs[1:] if one is not None])
    torch.testing.assert_close(got, want, rtol=0, atol=WITHIN)
    for mine, theirs in zip(routes, chosen, strict=True):
        assert torch.equal(torch.cat(mine).sort(-1).values, theirs)
    assert greedy == golden.generate(model, [tokens], 8)[0]


@pytest.mark.parametrize("name", ["compressed-int4", "compressed-int4-zeros"])
def test_blobs_are_as_large_as_what_is_packed(name: str, made: Made) -> None:
    """Each matrix starts on a boundary of 16 bytes, and each blob ends on one of 256."""
    spec = load_spec(made(name)[0])
    layout = open_files(Config(), spec, made(name)[0]).layout("float32")
    elements = 3 * layout.hidden * layout.intermediate
    per = quantized.SCHEMES[name].block
    assert sum(part.nbytes for part in layout.parts) == elements * per
    assert elements * per <= layout.nbytes < elements * per + 512


def change(source: Path, folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    weights = load_file(source / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())
    return folder


EXPERT = "model.layers.1.mlp.experts.2.up_proj"
DENSE = "model.layers.0.self_attn.k_proj"


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda weights: weights.__delitem__(name)


def replace(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda weights: weights.update({name: edit(weights[name]).contiguous()})


@pytest.mark.parametrize(
    ("scheme", "edit", "words"),
    [
        ("fp8", drop(f"{EXPERT}.weight_scale_inv"), r"2.up_proj.weight_scale_inv is missing"),
        ("fp8", drop(f"{DENSE}.weight_scale_inv"), r"k_proj.weight_scale_inv is missing"),
        ("fp8", replace(f"{EXPERT}.weight_scale_inv", torch.Tensor.half), "float16, expected"),
        ("fp8", replace(f"{EXPERT}.weight", torch.Tensor.float), "float32, expected F8_E4M3"),
        ("fp8", replace(f"{DENSE}.weight_scale_inv", lambda t: t[:, :1]), r"expected \[1, 2\]"),
        ("gptq", drop(f"{EXPERT}.scales"), "2.up_proj.scales is missing"),
        ("gptq", replace(f"{EXPERT}.qweight", lambda t: t.t()), "expected"),
        ("gptq", replace(f"{DENSE}.g_idx", lambda t: t.flip(0)), "act-order"),
        ("gptq", replace(f"{DENSE}.qzeros", lambda t: t + 1), "zero points"),
        ("awq", drop(f"{DENSE}.qzeros"), "k_proj.qzeros is missing"),
        ("compressed-int4", drop(f"{EXPERT}.weight_packed"), "2.up_proj.weight_packed is missing"),
        ("compressed-int4", replace(f"{EXPERT}.weight_packed", lambda t: t.long()), "dtype I64"),
        ("modelopt-nvfp4", drop(f"{EXPERT}.weight_scale_2"), "weight_scale_2 is missing"),
    ],
)  # fmt: skip
def test_a_broken_checkpoint_is_refused_by_name(
    scheme: str, edit: Any, words: str, made: Made, tmp_path: Path
) -> None:
    folder = change(made(scheme)[0], tmp_path, edit)
    with pytest.raises(ModelError, match=words):
        describe(Config(device="cpu"), folder)


_CT = quantized.SCHEMES["compressed-int4"].config


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not served; served are fp8"),
        ({"quant_method": "fp8"}, "weight_block_size"),
        (quantized.SCHEMES["fp8"].config | {"activation_scheme": "static"}, "activation_scheme"),
        (quantized.SCHEMES["fp8"].config | {"swizzle": 1}, "unknown keys quantization_config.swi"),
        (quantized.GPTQ_CONFIG | {"desc_act": True}, "act-order"),
        (quantized.GPTQ_CONFIG | {"bits": 3}, "quantization_config.bits is 3"),
        (quantized.GPTQ_CONFIG | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
        (quantized.SCHEMES["awq"].config | {"version": "gemv"}, "'gemv'"),
        (_CT | {"format": "marlin-24"}, "'marlin-24'"),
        (_CT | {"transform_config": {"hadamard": 1}}, "transform_config"),
        (quantized.ct_config("pack-quantized", num_bits=4, actorder="group"), "act-order"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
        (quantized.SCHEMES["fp8"].config | {"modules_to_not_convert": [EXPERT]}, "leaves it out"),
    ],
)  # fmt: skip
def test_a_config_is_refused_by_name(
    config: dict[str, Any], words: str, made: Made, tmp_path: Path
) -> None:
    source = made("fp8")[0]
    raw = json.loads((source / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        describe(Config(device="cpu"), tmp_path)


def test_experts_quantised_while_loading(made: Made, tmp_path: Path) -> None:
    """As good as the same experts rounded before; the report says that it is lossy."""
    folder, tokens = made("fp8")[1], asked()
    raw = json.loads((folder / "config.json").read_text()) | {"moe_intermediate_size": 33}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="33 elements do not fill bytes"):
        describe(Config(device="cpu", load_format="dummy", expert_dtype="mxfp4"), tmp_path)
    with pytest.raises(ConfigError, match="quantised already"):
        describe(Config(device="cpu", expert_dtype="int4"), made("fp8")[0])
    for name, form in formats.LOSSY.items():
        report = describe(Config(device="cpu", expert_dtype=name), folder)
        assert any("lossy" in note and name in note for note in report["notes"])
        assert report["kernels"]["grouped_experts"][0] == "torch reference"
        found = _logprobs(folder, tokens, expert_dtype=name, host_memory=1 << 16)
        rounded = shutil.copytree(folder, tmp_path / name)
        for file in rounded.glob("*.safetensors"):
            weights = {n: _round(form, n, weight) for n, weight in load_file(file).items()}
            save_file(weights, file)
        torch.testing.assert_close(found, _logprobs(rounded, tokens), rtol=0, atol=WITHIN)


def _round(form: Format, name: str, weight: torch.Tensor) -> torch.Tensor:
    if ".experts." not in name:
        return weight
    return dequantize(form, quantize(form, weight), *weight.shape, torch.float32)


def _logprobs(folder: Path, tokens: list[int], **settings: Any) -> torch.Tensor:
    with drive.engine(folder, **settings) as engine:
        found = drive.generate(engine, [forced(tokens)])["a"].prompt_logprobs
    assert found is not None
    return torch.tensor([one.logprob for one in found[1:] if one is not None])


def test_dummy_weights_are_packed_as_the_config_says(made: Made) -> None:
    with drive.engine(made("gptq-zeros")[0], load_format="dummy") as engine:
        assert len(drive.generate(engine, [drive.greedy("a", [9, 10], 4)])["a"].tokens) == 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of what a step with a fault computes
def test_on_a_gpu_that_is_interpreted(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed experts through a decode step and a sweep, with a few slots, as on the CPU."""
    pytest.importorskip("triton")
    from moestro.engine.gpu import build as gpu
    from moestro.engine.gpu import product
    from tests.oracle.interpreter import mend

    folder, prompt = made("compressed-int4-zeros")[0], asked()[:5]
    with drive.engine(folder) as engine:
        want = drive.generate(engine, [drive.greedy("a", prompt, 2)])["a"].tokens
    mend()
    monkeypatch.setattr(build, "runs_kernels", lambda kind: True)
    monkeypatch.setattr(gpu, "COMPILED", ())
    monkeypatch.setattr(gpu, "PIECES", 1)
    monkeypatch.setattr(product, "serves", lambda *sizes: False)  # slow to interpret
    monkeypatch.setattr(product, "FEW_ROWS", 1)
    small = {"max_num_seqs": 1, "max_sweep_tokens": 8, "expert_slots": 6, "max_model_len": 32}
    with drive.engine(folder, host_memory=1 << 17, **small) as engine:
        assert drive.generate(engine, [drive.greedy("a", prompt, 2)])["a"].tokens == want
