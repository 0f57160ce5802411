from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moestro.errors import ConfigError
from moestro.expert_cache.trace import NO_SEQUENCE, Header, Step, TraceWriter, distinct, read_trace

LAYERS, EXPERTS, TOP = 3, 300, 2

rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, EXPERTS - 1), min_size=TOP, max_size=TOP),
        st.sampled_from("abc"),
    ),
    max_size=5,
)
steps = st.lists(
    st.tuples(
        st.sampled_from(["decode", "sweep"]),
        st.booleans(),
        st.lists(st.tuples(st.integers(0, LAYERS - 1), rows), max_size=4),
        st.lists(st.sampled_from("abcd"), max_size=2),
    ),
    max_size=6,
)


def writer(path: Path, **more: Any) -> TraceWriter:
    return TraceWriter(path, LAYERS, EXPERTS, TOP, "a model", **more)


def record(trace: TraceWriter, content: list[Any]) -> None:
    for kind, resumed, routes, finished in content:
        trace.begin(kind, sum(len(rows) for _, rows in routes), resumed=resumed)
        for layer, some in routes:
            ids = np.array([ids for ids, _ in some], np.int64).reshape(-1, TOP)
            trace.record(layer, ids, [sequence for _, sequence in some])
        for sequence in finished:
            trace.finish(sequence)


def expected(content: list[Any]) -> list[Any]:
    """The same as plain values, with sequences numbered as the writer numbers them."""
    numbers: dict[str, int] = {}
    count = 0
    result = []
    for kind, resumed, routes, finished in content:
        out = []
        for layer, some in routes:
            for _, sequence in some:
                if sequence not in numbers:
                    numbers[sequence] = count
                    count += 1
            out.append((layer, [ids for ids, _ in some], [numbers[s] for _, s in some]))
        ended = [numbers.pop(s) for s in finished if s in numbers]
        result.append((kind, resumed, sum(len(r) for _, r in routes), out, ended))
    return result


def plain(step: Step) -> Any:
    routes = [(r.layer, r.ids.tolist(), r.sequences.tolist()) for r in step.routes]
    return step.kind, step.resumed, step.rows, routes, step.finished


@given(content=steps)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(content: list[Any], tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    trace = writer(path, expert_bytes=77)
    record(trace, content)
    trace.close()
    trace.close()
    found = read_trace(path)
    assert found.header == Header(1, LAYERS, EXPERTS, TOP, "a model", 77)
    assert [plain(step) for step in found] == expected(content)
    assert [plain(step) for step in found] == expected(content), "and can be read again"


@given(content=steps, cut=st.integers(0, 400), junk=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_torn_file_is_read_as_far_as_it_goes(
    content: list[Any], cut: int, junk: bool, tmp_path_factory: Any
) -> None:
    path = tmp_path_factory.mktemp("trace") / "t"
    trace = writer(path)
    trace._file.flush()  # type: ignore[union-attr]
    head = path.stat().st_size
    record(trace, content)
    trace.close()
    whole = path.read_bytes()
    path.write_bytes(whole[: max(head, len(whole) - cut)] + b"\xff" * (junk and not cut))
    found = [plain(step) for step in read_trace(path)]
    truth = expected(content)
    assert found[:-1] == truth[: len(found[:-1])]
    if found:
        last, true = found[-1], truth[len(found) - 1]
        assert last[:3] == true[:3]
        assert last[3] == true[3][: len(last[3])], "only the end of the last step may lack"


def test_appending_after_a_crash_continues(tmp_path: Path) -> None:
    path = tmp_path / "t"
    first = [("decode", False, [(0, [([1, 2], "a"), ([3, 299], "b")])], [])]
    trace = writer(path)
    record(trace, first)
    trace.close()
    path.write_bytes(path.read_bytes() + b"\x40\x00\x00\x00torn")
    again = writer(path)
    record(again, first)
    again.close()
    one, two = read_trace(path)
    assert one.routes[0].sequences.tolist() == [0, 1]
    assert two.routes[0].sequences.tolist() == [2, 3], "ids of another process are others"
    assert two.routes[0].ids.tolist() == [[1, 2], [3, 299]]


def test_rows_without_sequence(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t")
    trace.begin("decode", 2)
    trace.record(1, np.array([[1, 2], [3, 4]]))
    trace.close()
    (step,) = read_trace(tmp_path / "t")
    assert step.routes[0].sequences.tolist() == [NO_SEQUENCE] * 2


def test_sequence_ids_are_not_written(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t")
    trace.begin("decode", 1)
    trace.record(0, np.array([[1, 2]]), ["request-secret"])
    trace.close()
    assert b"secret" not in (tmp_path / "t").read_bytes()


def test_finished_sequences_are_forgotten(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t")
    for number in range(100):
        trace.record(0, np.array([[1, 2]]), [str(number)])
        trace.finish(str(number))
    assert not trace._numbers
    trace.close()


def test_writes_are_buffered(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t")
    for _ in range(50):
        trace.record(0, np.array([[1, 2]]), ["a"])
    assert (tmp_path / "t").stat().st_size == 0
    trace.close()


def test_a_full_disk_ends_the_trace_but_not_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Full:
        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

    trace = writer(tmp_path / "t")
    trace._file.close()  # type: ignore[union-attr]
    trace._file = Full()  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        trace.begin("decode", 1)
        trace.begin("decode", 1)
        trace.close()
    assert [r.message for r in caplog.records] == [
        f"tracing to {tmp_path / 't'} has stopped: [Errno 28] No space left on device"
    ]


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with pytest.raises(ConfigError, match="not a trace"):
        read_trace(path)
    for content in (b"", b"\x05\x00\x00\x00hello", b"some text that is longer than a frame"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a trace"):
            read_trace(path)
    path.write_bytes(b"precious notes")
    with pytest.raises(ConfigError, match="not a trace"):
        writer(path)
    assert path.read_bytes() == b"precious notes"
    with pytest.raises(ConfigError, match="cannot write"):
        writer(tmp_path / "missing" / "t")


def test_a_damaged_frame_is_named(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t")
    trace.begin("decode", 1)
    trace.close()
    content = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(content[:-1] + b"\x07")
    with pytest.raises(ConfigError, match=f"damaged before byte {len(content)}"):
        list(read_trace(tmp_path / "t"))


def test_a_trace_of_another_model_is_not_appended_to(tmp_path: Path) -> None:
    writer(tmp_path / "t").close()
    with pytest.raises(ConfigError, match="something else"):
        TraceWriter(tmp_path / "t", LAYERS, EXPERTS, TOP, "another")


def test_wrong_shapes_are_refused(tmp_path: Path) -> None:
    trace = writer(tmp_path / "t")
    with pytest.raises(ValueError, match="top 2"):
        trace.record(0, np.array([[1, 2, 3]]))
    trace.close()
    with pytest.raises(ConfigError, match="65536"):
        TraceWriter(tmp_path / "u", 1, 70000, 1, "m")


def test_distinct() -> None:
    names, rows = distinct(["b", "a", "b", "b", "c"])
    assert (names, rows.tolist()) == (["b", "a", "c"], [0, 1, 0, 0, 2])
    assert distinct([])[0] == []
