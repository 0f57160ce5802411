"""Direct reads: the same bytes as buffered ones, whatever the offsets; and what if refused."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moestro.errors import ModelError
from moestro.expert_cache import direct
from moestro.expert_cache.direct import BLOCK, Buffers, join
from moestro.expert_cache.layout import ExpertSource, Extent, gated_layout
from moestro.expert_cache.store import SafetensorsStore

HIDDEN, INTER, EXPERTS = 64, 40, 5
LAYOUT = gated_layout(HIDDEN, INTER, "bfloat16")
MATRIX = HIDDEN * INTER * 2  # 5120 bytes
EXPERT = 3 * MATRIX


def sources(path: Path, start: int, *, gap: int = 0, dtype: str = "bfloat16") -> list[ExpertSource]:
    """down, gate, up of each expert, `gap` bytes apart, from offset `start` on."""
    size = MATRIX * (2 if dtype == "float32" else 1)
    ends = (("down", 0, HIDDEN), ("gate_up", 0, INTER), ("gate_up", INTER, INTER))
    offsets = [start + n * (size + gap) for n in range(3 * EXPERTS)]
    return [
        ExpertSource(
            0,
            expert,
            tuple(
                Extent(str(path), offsets[3 * expert + n], size, dtype, *end)
                for n, end in enumerate(ends)
            ),
        )
        for expert in range(EXPERTS)
    ]


def write(path: Path, nbytes: int) -> Path:
    random = np.random.default_rng(0).standard_normal(nbytes // 4 + 1, dtype=np.float32)
    path.write_bytes(random.tobytes()[:nbytes])
    return path


def blobs(store: SafetensorsStore) -> list[bytes]:
    out = np.zeros((EXPERTS, LAYOUT.nbytes), np.uint8)
    for expert in range(EXPERTS):
        store.read(0, expert, out[expert].data)
    return [blob.tobytes() for blob in out]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = write(tmp_path / "a.safetensors", 200_000)
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the filesystem of the temporary folder refuses O_DIRECT")
    return path


@pytest.mark.parametrize("piece", [BLOCK, 3 * BLOCK, 16 << 20])
@pytest.mark.parametrize(
    ("start", "gap", "dtype"),
    [
        (0, 0, "bfloat16"),
        (123, 0, "bfloat16"),
        (4095, 1, "bfloat16"),
        (4096, 5000, "bfloat16"),
        (200_000 - EXPERTS * EXPERT, 0, "bfloat16"),  # to the last byte of the file
        (120, 0, "float32"),
        (121, 7, "float16"),
    ],
)
def test_the_same_bytes_as_buffered(
    path: Path, start: int, gap: int, dtype: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "PIECE", piece)
    found = sources(path, start, gap=gap, dtype=dtype)
    plain = SafetensorsStore(LAYOUT, found)
    store = SafetensorsStore(LAYOUT, found, direct=True)
    assert plain.direct_files == 0
    assert plain.reason is None
    assert (store.direct_files, store.reason) == (1, None)
    assert blobs(store) == blobs(plain)
    assert store.direct_files == 1
    size = EXPERT * (2 if dtype == "float32" else 1)
    assert store.read(0, 1, np.zeros(LAYOUT.nbytes, np.uint8).data) == size
    store.close()
    plain.close()


def test_neighbours_are_read_in_one_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    preadv = os.preadv

    def spy(fd: int, buffers: Any, at: int) -> int:
        calls.append((at, len(buffers[0])))
        return preadv(fd, buffers, at)

    store = SafetensorsStore(LAYOUT, sources(path, 4096 - 100), direct=True)
    monkeypatch.setattr(os, "preadv", spy)
    store.read(0, 0, np.zeros(LAYOUT.nbytes, np.uint8).data)
    assert calls == [(0, 5 * BLOCK)], "3996 .. 19356, to whole blocks"
    store.close()


def test_runs_are_by_file_and_offset() -> None:
    a = Extent("a", 1000, 500, "bfloat16", "down", 0, 1)
    near = replace(a, offset=1500 + BLOCK - 1)
    far = replace(a, offset=1500 + BLOCK)
    inside = replace(a, offset=1100, nbytes=10)
    other = replace(a, path="b")
    assert [(r.path, r.offset, r.nbytes, len(r.extents)) for r in join([other, near, a])] == [
        ("a", 1000, 1000 + BLOCK - 1, 2),
        ("b", 1000, 500, 1),
    ]
    assert len(join([far, a])) == 2
    assert [(r.offset, r.nbytes) for r in join([inside, a])] == [(1000, 500)]


def test_many_threads_share_the_buffers(path: Path) -> None:
    found = sources(path, 123)
    plain = SafetensorsStore(LAYOUT, found)
    truth = blobs(plain)
    store = SafetensorsStore(LAYOUT, found, direct=True)

    def right(number: int) -> bool:
        out = np.zeros(LAYOUT.nbytes, np.uint8)
        store.read(0, number % EXPERTS, out.data)
        return out.tobytes() == truth[number % EXPERTS]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(right, range(400)))
    assert 1 <= len(store._buffers._idle) <= 8
    store.close()
    assert store._buffers._idle == []
    plain.close()


def refuse_open(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: str, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)


def refuse_read(monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv

    def refuse(fd: int, buffers: Any, at: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", refuse)


@pytest.mark.parametrize("refuse", [refuse_open, refuse_read])
def test_a_filesystem_that_refuses_is_read_through_its_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Callable[[pytest.MonkeyPatch], None]
) -> None:
    found = sources(path, 123)
    plain = SafetensorsStore(LAYOUT, found)
    truth = blobs(plain)
    refuse(monkeypatch)
    store = SafetensorsStore(LAYOUT, found, direct=True)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: blobs(store), range(4))) == [truth] * 4
    assert store.direct_files == 0
    assert "a.safetensors: the filesystem refuses O_DIRECT" in (store.reason or "")
    store.close()
    plain.close()


def test_other_failures_are_not_taken_for_a_refusal(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SafetensorsStore(LAYOUT, sources(path, 5000), direct=True)

    def fail(fd: int, buffers: Any, at: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(ModelError, match=r"a\.safetensors at offset 4096: Input/output error"):
        store.read(0, 0, np.zeros(LAYOUT.nbytes, np.uint8).data)
    assert store.direct_files == 1
    store.close()


def test_a_file_cut_short_later_names_file_and_offset(path: Path) -> None:
    store = SafetensorsStore(LAYOUT, sources(path, 123), direct=True)
    os.truncate(path, 9000)
    with pytest.raises(ModelError, match=r"a\.safetensors is cut short: it ends at offset 9000"):
        store.read(0, 0, np.zeros(LAYOUT.nbytes, np.uint8).data)
    store.close()


def test_a_buffer_comes_back_after_a_failure() -> None:
    buffers = Buffers(8192)
    with pytest.raises(KeyError), buffers.take() as first:
        raise KeyError
    with buffers.take() as second, buffers.take() as third:
        assert second is first
        assert third is not first
        assert third.ctypes.data % 4096 == 0
