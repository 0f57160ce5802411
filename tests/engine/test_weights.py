"""Dense weights: read to a device tensor by tensor, or drawn there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from moestro.engine import checkpoint as files
from moestro.engine.checkpoint import Checkpoint, TensorRef
from moestro.engine.models.registry import load_spec
from moestro.engine.weights import DecoderWeights, LayerWeights, dummy_dense, load_dense
from tests.oracle import tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.make(tmp_path / "model", tiny.Spec("qwen3_moe", 3))


def tensors(weights: DecoderWeights) -> list[torch.Tensor]:
    named = [getattr(layer, name) for layer in weights.layers for name in LayerWeights.__slots__]
    every = [weights.embedding, weights.final_norm, weights.head, *named]
    return [tensor for tensor in every if tensor is not None]


def silent(done: int, total: int) -> None:
    pass


def test_every_tensor_goes_to_the_device_as_it_is_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = load_spec(model)
    read: list[str] = []
    load = files.load_tensor

    def spy(ref: TensorRef, dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
        tensor = load(ref, dtype, device)
        assert tensor.device.type == "meta", "before the next is read"
        read.append(ref.name)
        return tensor

    monkeypatch.setattr("moestro.engine.weights.load_tensor", spy)
    weights = load_dense(Checkpoint(model), spec, torch.bfloat16, silent, device="meta")
    assert {t.device.type for t in tensors(weights)} == {"meta"}
    assert {t.dtype for t in tensors(weights)} == {torch.bfloat16}
    assert not [name for name in read if ".experts." in name]


def test_the_cpu_is_the_default(model: Path) -> None:
    spec = load_spec(model)
    truth = load_file(model / "model.safetensors")
    for weights in (
        load_dense(Checkpoint(model), spec, torch.float32, silent),
        load_dense(Checkpoint(model), spec, torch.float32, silent, device="cpu"),
    ):
        assert torch.equal(weights.embedding, truth["model.embed_tokens.weight"].float())
        out = truth["model.layers.1.self_attn.o_proj.weight"].float()
        assert torch.equal(weights.layers[1].out, out)


def test_dummy_weights_repeat_and_have_their_spread(model: Path) -> None:
    spec = load_spec(model)
    weights = dummy_dense(spec, torch.float32, 5)
    again = dummy_dense(spec, torch.float32, 5, device="cpu")
    for one, other in zip(tensors(weights), tensors(again), strict=True):
        assert torch.equal(one, other)
    # What every version so far has drawn first from this seed.
    first = torch.empty_like(weights.embedding)
    first.normal_(0.0, 1.0, generator=torch.Generator().manual_seed(5))
    assert torch.equal(weights.embedding, first)
    router = weights.layers[0].router
    assert router is not None
    for matrix in (router, weights.layers[0].qkv, weights.head):
        assert matrix.std().item() == pytest.approx(0.02, rel=0.2)
    assert bool((weights.final_norm == 1).all())


@pytest.mark.gpu
def test_dummy_weights_are_drawn_on_the_gpu(model: Path) -> None:
    spec = load_spec(model)
    weights, again = (dummy_dense(spec, torch.bfloat16, 5, device="cuda") for _ in range(2))
    for one, other in zip(tensors(weights), tensors(again), strict=True):
        assert one.is_cuda
        assert torch.equal(one, other)
    assert weights.embedding.float().std().item() == pytest.approx(1.0, rel=0.1)
    loaded = load_dense(Checkpoint(model), spec, torch.bfloat16, silent, device="cuda")
    plain = load_dense(Checkpoint(model), spec, torch.bfloat16, silent)
    for one, other in zip(tensors(loaded), tensors(plain), strict=True):
        assert one.is_cuda
        assert torch.equal(one.cpu(), other)
