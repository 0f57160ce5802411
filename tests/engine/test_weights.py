"""Dense weights: read to a device, or drawn there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moestro.engine.checkpoint import Checkpoint
from moestro.engine.models.registry import load_spec
from moestro.engine.tensor_reader import TensorReader
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


def test_dense_tensors_are_read_to_the_device_and_no_experts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, found = load_spec(model), Checkpoint(model)
    read: list[str] = []
    place = TensorReader._place

    def spy(reader: TensorReader, piece: Any) -> None:
        read.append(piece.piece.ref.name)
        place(reader, piece)

    monkeypatch.setattr(TensorReader, "_place", spy)
    weights = load_dense(found, spec, torch.bfloat16, silent, device="meta")
    assert {t.device.type for t in tensors(weights)} == {"meta"}
    assert {t.dtype for t in tensors(weights)} == {torch.bfloat16}
    assert sorted(read) == sorted(name for name in found.tensors if ".experts." not in name)


def test_progress_counts_every_byte_once(model: Path) -> None:
    found = Checkpoint(model)
    seen: list[tuple[int, int]] = []
    load_dense(found, load_spec(model), torch.float32, lambda *now: seen.append(now))
    total = sum(ref.nbytes for name, ref in found.tensors.items() if ".experts." not in name)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {of for _, of in seen} == {total}


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
