from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moestro.errors import ModelError
from moestro.expert_cache.layout import DTYPE_BYTES, ExpertSource, Extent, gated_layout
from moestro.expert_cache.slots import SlotPool
from moestro.expert_cache.store import DummyStore, SafetensorsStore

HIDDEN, INTER, LAYERS, EXPERTS = 24, 10, 2, 3
DTYPES = sorted(DTYPE_BYTES)


def offsets(path: Path) -> dict[str, tuple[int, int]]:
    import json

    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: (8 + size + entry["data_offsets"][0], 8 + size + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != "__metadata__"
    }


class Checkpoint:
    """A small checkpoint: gate, up and down of every expert, one file for each layer."""

    def __init__(self, folder: Path, dtype: str) -> None:
        torch.manual_seed(0)
        self.sources = []
        self.truth: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        kind = getattr(torch, dtype)
        for layer in range(LAYERS):
            tensors = {}
            for expert in range(EXPERTS):
                gate, up = torch.randn(2, INTER, HIDDEN).to(kind).unbind(0)
                down = torch.randn(HIDDEN, INTER).to(kind)
                names = {"gate": gate, "up": up, "down": down}
                tensors.update({f"{expert}.{n}": t.contiguous() for n, t in names.items()})
                self.truth[layer, expert] = (torch.cat([gate, up]), down)
            self.path = folder / f"layer{layer}.safetensors"
            save_file(tensors, self.path)
            at = offsets(self.path)
            for expert in range(EXPERTS):
                extents = []
                for name, part, row, rows in (
                    ("down", "down", 0, HIDDEN),
                    ("up", "gate_up", INTER, INTER),
                    ("gate", "gate_up", 0, INTER),
                ):
                    lo, hi = at[f"{expert}.{name}"]
                    extents.append(Extent(str(self.path), lo, hi - lo, dtype, part, row, rows))
                self.sources.append(ExpertSource(layer, expert, tuple(extents)))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path, "bfloat16")


@pytest.fixture
def store(checkpoint: Checkpoint) -> Iterator[SafetensorsStore]:
    store = SafetensorsStore(gated_layout(HIDDEN, INTER, "bfloat16"), checkpoint.sources)
    yield store
    store.close()


@pytest.mark.parametrize("held", DTYPES)
@pytest.mark.parametrize("written", DTYPES)
def test_reads_every_expert_in_every_dtype(tmp_path: Path, written: str, held: str) -> None:
    checkpoint = Checkpoint(tmp_path, written)
    layout = gated_layout(HIDDEN, INTER, held)
    kind = getattr(torch, held)
    store = SafetensorsStore(layout, checkpoint.sources)
    pool = SlotPool(layout, 1, "cpu", kind)
    blob = np.zeros(layout.nbytes, np.uint8)
    for (layer, expert), (gate_up, down) in checkpoint.truth.items():
        read = store.read(layer, expert, blob.data)
        assert read == 3 * HIDDEN * INTER * DTYPE_BYTES[written]
        pool.write(0, blob)
        assert torch.equal(pool.gate_up[0], gate_up.to(kind))
        assert torch.equal(pool.down[0], down.to(kind))
    store.close()
    store.close()


def test_many_threads_read_at_once(checkpoint: Checkpoint, store: SafetensorsStore) -> None:
    def read(number: int) -> bool:
        layer, expert = divmod(number % (LAYERS * EXPERTS), EXPERTS)
        blob = np.zeros(store.layout.nbytes, np.uint8)
        store.read(layer, expert, blob.data)
        found = torch.from_numpy(blob[: 2 * INTER * HIDDEN * 2]).view(torch.bfloat16)
        return torch.equal(found.view(2 * INTER, HIDDEN), checkpoint.truth[layer, expert][0])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, range(200)))


def test_a_file_cut_short_is_refused_at_start(checkpoint: Checkpoint) -> None:
    os.truncate(checkpoint.path, checkpoint.path.stat().st_size - 1)
    with pytest.raises(ModelError, match=r"layer1\.safetensors is cut short: \d+ bytes") as error:
        SafetensorsStore(gated_layout(HIDDEN, INTER, "bfloat16"), checkpoint.sources)
    assert str(checkpoint.path.stat().st_size) in error.value.message


def test_a_file_cut_short_later_names_file_and_offset(
    checkpoint: Checkpoint, store: SafetensorsStore
) -> None:
    extent = checkpoint.sources[-1].extents[0]
    os.truncate(checkpoint.path, extent.offset + 5)
    blob = np.zeros(store.layout.nbytes, np.uint8)
    with pytest.raises(ModelError, match=rf"layer1\.safetensors.* offset {extent.offset + 5}"):
        store.read(LAYERS - 1, EXPERTS - 1, blob.data)


def test_a_missing_file_or_expert_is_named(checkpoint: Checkpoint, store: SafetensorsStore) -> None:
    blob = np.zeros(store.layout.nbytes, np.uint8)
    with pytest.raises(ModelError, match="no expert 7 in MoE layer 1"):
        store.read(1, 7, blob.data)
    checkpoint.path.unlink()
    with pytest.raises(ModelError, match=r"cannot open .*layer1"):
        SafetensorsStore(store.layout, checkpoint.sources)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row": 1, "rows": HIDDEN - 1, "nbytes": (HIDDEN - 1) * INTER * 2}, "do not fill down"),
        ({"nbytes": 7}, "has 7 at offset"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"part": "gate"}, "cannot read 'gate'"),
    ],
)
def test_sources_that_do_not_fill_a_blob_are_refused(
    checkpoint: Checkpoint, change: dict[str, object], message: str
) -> None:
    source = checkpoint.sources[0]
    extents = (replace(source.extents[0], **change), *source.extents[1:])  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=message):
        SafetensorsStore(
            gated_layout(HIDDEN, INTER, "bfloat16"), [replace(source, extents=extents)]
        )


def test_two_sources_for_one_expert_are_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(ModelError, match="1 experts have two sources"):
        SafetensorsStore(
            gated_layout(HIDDEN, INTER, "bfloat16"), [*checkpoint.sources, checkpoint.sources[0]]
        )


def test_overlapping_extents_are_refused(checkpoint: Checkpoint) -> None:
    source = checkpoint.sources[0]
    doubled = replace(source, extents=(*source.extents, source.extents[0]))
    with pytest.raises(ModelError, match="do not fill down"):
        SafetensorsStore(gated_layout(HIDDEN, INTER, "bfloat16"), [doubled])


def test_closing_gives_back_file_descriptors(checkpoint: Checkpoint) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store = SafetensorsStore(gated_layout(HIDDEN, INTER, "bfloat16"), checkpoint.sources)
    assert len(os.listdir("/proc/self/fd")) == before + LAYERS
    store.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("dtype", DTYPES)
def test_dummy_weights_are_random_and_repeat(dtype: str) -> None:
    layout = gated_layout(64, 48, dtype)

    def blob(seed: int, layer: int, expert: int) -> torch.Tensor:
        out = np.zeros(layout.nbytes, np.uint8)
        assert DummyStore(layout, seed).read(layer, expert, out.data) == layout.nbytes
        return torch.from_numpy(out).view(getattr(torch, dtype)).float()

    base = blob(1, 0, 0)
    assert torch.equal(base, blob(1, 0, 0))
    for other in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        assert not torch.equal(base, blob(*other))
    assert abs(base.mean()) < 0.002
    assert abs(base.std() - 0.02) < 0.002


@pytest.mark.parametrize("found", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("direct", [False, True])
def test_a_matrix_that_lies_transposed(
    tmp_path: Path, found: str, wanted: str, direct: bool
) -> None:
    checkpoint = Checkpoint(tmp_path, found)
    gate_up, down = checkpoint.truth[0, 1]
    path = tmp_path / "stacked.safetensors"
    save_file({"gate_up": gate_up, "down": down.t().contiguous()}, path)
    at = offsets(path)
    extents = tuple(
        Extent(str(path), at[n][0], at[n][1] - at[n][0], found, n, 0, rows, transposed=n == "down")
        for n, rows in (("gate_up", 2 * INTER), ("down", HIDDEN))
    )
    layout = gated_layout(HIDDEN, INTER, wanted)
    store = SafetensorsStore(layout, [ExpertSource(0, 0, extents)], direct=direct)
    try:
        blob = bytearray(layout.nbytes)
        store.read(0, 0, memoryview(blob))
    finally:
        store.close()
    for part, truth in zip(layout.parts, (gate_up, down), strict=True):
        size = truth.numel() * DTYPE_BYTES[wanted]
        raw = bytearray(blob[part.offset : part.offset + size])
        read = torch.frombuffer(raw, dtype=getattr(torch, wanted)).view(part.shape)
        assert torch.equal(read, truth.to(getattr(torch, wanted)))
