"""Tensors read in parallel: the right bytes, bounded buffers, and failures that say what failed."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from moestro.engine import tensor_reader
from moestro.engine.checkpoint import TensorRef
from moestro.engine.tensor_reader import TensorReader
from moestro.errors import ModelError
from moestro.expert_cache.direct import BLOCK, File, aligned

CPU = torch.device("cpu")


def silent(done: int, total: int) -> None:
    pass


def checkpoint(
    folder: Path, shapes: list[tuple[int, ...]], start: int = 13, dtype: str = "float32"
) -> tuple[list[TensorRef], list[torch.Tensor]]:
    """Tensors in two files, at odd offsets."""
    generator = torch.Generator().manual_seed(1)
    refs, truth = [], []
    contents = {"a": b"x" * start, "b": b"y" * (start + 2)}
    for number, shape in enumerate(shapes):
        tensor = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        name = "ab"[number % 2]
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        path = str(folder / name)
        refs.append(TensorRef(f"t{number}", path, len(contents[name]), len(data), dtype, shape))
        contents[name] += data
        truth.append(tensor)
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return refs, truth


SHAPES = [(3, 5), (1000, 7), (0, 4), (), (64, 64), (1,), (5000,)]


@pytest.mark.parametrize("piece", [8, 4096, 16 << 20])
@pytest.mark.parametrize(("found", "wanted"), [("float32", "float32"), ("bfloat16", "float32")])
def test_the_bytes_are_those_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int, found: str, wanted: str
) -> None:
    monkeypatch.setattr(tensor_reader, "PIECE", piece)
    shapes = [(3, 5), (30, 7), (0, 4), (), (8, 8)] if piece == 8 else SHAPES
    refs, truth = checkpoint(tmp_path, shapes, dtype=found)
    seen: list[tuple[int, int]] = []
    with TensorReader(refs, getattr(torch, wanted), CPU, lambda *now: seen.append(now)) as reader:
        for ref, right in zip(refs, truth, strict=True):
            tensor = reader.take(ref)
            assert tensor.shape == right.shape
            assert torch.equal(tensor, right.to(getattr(torch, wanted)))
    total = sum(ref.nbytes for ref in refs)
    assert seen[-1] == (total, total)


def test_reads_run_side_by_side_and_no_further_ahead_than_there_are_buffers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reader, "PIECE", 4096)
    monkeypatch.setattr(tensor_reader, "READERS", 3)
    together = threading.Barrier(3)
    first = [threading.Event() for _ in range(3)]
    begun: list[int] = []
    read = File.read

    def spy(file: File, at: int, nbytes: int, buffer: Any) -> Any:
        begun.append(at)
        if len(begun) <= 3:
            first[len(begun) - 1].set()
            together.wait(10)  # passes only when three reads are under way
        return read(file, at, nbytes, buffer)

    monkeypatch.setattr(File, "read", spy)
    refs, truth = checkpoint(tmp_path, [(40, 1024)])
    with TensorReader(refs, torch.float32, CPU, silent) as reader:
        for event in first:
            assert event.wait(10)
        while reader._read.qsize() < 3:
            pass
        assert len(begun) == 3, "all buffers are full, and nobody has taken any"
        assert torch.equal(reader.take(refs[0]), truth[0])
    assert len(begun) == 40


def test_leaving_early_ends_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "PIECE", 8)
    refs, _ = checkpoint(tmp_path, [(50, 50), (50, 50)])
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), TensorReader(refs, torch.float32, CPU, silent):
        raise ZeroDivisionError
    assert threading.active_count() == before


def test_a_file_that_is_cut_or_gone_is_named(tmp_path: Path) -> None:
    refs, _ = checkpoint(tmp_path, [(100, 100), (100, 100)])
    os.truncate(refs[0].path, 20_000)
    cut = pytest.raises(ModelError, match=r"/a is cut short: it ends at offset 20000")
    with TensorReader(refs, torch.float32, CPU, silent) as reader, cut:
        reader.take(refs[0])
    os.unlink(refs[1].path)
    with pytest.raises(ModelError, match=r"cannot open .*/b: No such file"):
        TensorReader(refs, torch.float32, CPU, silent)


def test_a_disk_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "READ_SECONDS", 0.02)
    go = threading.Event()
    read = File.read

    def hang(file: File, at: int, nbytes: int, buffer: Any) -> Any:
        go.wait(10)
        return read(file, at, nbytes, buffer)

    monkeypatch.setattr(File, "read", hang)
    refs, _ = checkpoint(tmp_path, [(4, 4)])
    with TensorReader(refs, torch.float32, CPU, silent) as reader:
        with pytest.raises(ModelError, match=r"tensor t0: nothing could be read"):
            reader.take(refs[0])
        go.set()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize(("at", "nbytes"), [(0, 1), (4095, 2), (4096, 4096), (100, 9000)])
def test_one_range_of_a_file(tmp_path: Path, direct: bool, at: int, nbytes: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(range(256)) * 60)
    file = File(str(path), direct=direct)
    buffer = aligned(-(-nbytes // BLOCK) * BLOCK + 2 * BLOCK)
    found = file.read(at, nbytes, buffer)
    assert found.tobytes() == path.read_bytes()[at : at + nbytes]
    with pytest.raises(ModelError, match="cut short"):
        file.read(len(path.read_bytes()) - 10, 11, buffer)
    file.close()


@pytest.mark.gpu
def test_buffers_are_locked_for_a_gpu_and_given_back(tmp_path: Path) -> None:
    refs, truth = checkpoint(tmp_path, [(3000, 3000), (77,), (500, 9000)])
    with TensorReader(refs, torch.bfloat16, torch.device("cuda"), silent) as reader:
        for ref, right in zip(refs, truth, strict=True):
            assert torch.equal(reader.take(ref).cpu(), right.bfloat16())
