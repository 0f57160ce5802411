"""The acquire kernel against the plain Python bookkeeping, over many steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moestro.kernels import reference_tables as plain
from moestro.kernels.gpu.acquire import acquire
from moestro.kernels.gpu.tables import CacheTables, Fault, LayerWork, StepLog

POISON = -7


def to_device(tables: plain.Tables, device: str) -> CacheTables:
    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return CacheTables(
        slot_of=ints(tables.slot_of),
        owner=ints(tables.owner),
        source=ints(tables.source, torch.int64),
        admit=ints([int(a) for a in tables.admit], torch.uint8),
        victims=ints(tables.victims),
        cursor=ints([tables.cursor, len(tables.victims)]),
        fault=ints(list(tables.fault)),
        share=ints(tables.share or [0] * (tables.experts + 1)),
        slots=len(tables.owner),
        ring=tables.ring,
        experts=tables.experts,
    )


class Both:
    """The kernel and the reference, side by side."""

    def __init__(self, tables: plain.Tables, rows: int, k: int, device: str) -> None:
        self.plain = tables
        self.real = to_device(tables, device)
        layers = len(tables.slot_of) // tables.experts
        self.shape = (rows, k)
        self.work = LayerWork.empty(tables.experts, rows * k, device)
        self.log = StepLog.empty(layers, self.work.groups, device)
        self.device = device

    def relist(self, victims: list[int]) -> None:
        """Between steps: a new list of victims, and no fault."""
        self.plain.victims, self.plain.cursor, self.plain.fault = victims, 0, (Fault.NONE, 0)
        self.real.victims[: len(victims)] = torch.tensor(victims, dtype=torch.int32)
        self.real.cursor.copy_(torch.tensor([0, len(victims)]))
        self.real.fault.zero_()

    def acquire(self, layer: int, ids: list[int]) -> plain.Work:
        for tensor in (self.work.order, self.work.group_slot, self.work.group_lo, self.work.taken):
            tensor.fill_(POISON)
        self.work.job_slot.fill_(POISON)
        self.work.job_src.fill_(POISON)
        routed = torch.tensor(ids, dtype=torch.int32, device=self.device).view(self.shape)
        split = bool(self.plain.share)
        acquire(layer, routed, self.real, work=self.work, log=self.log, split=split)
        expected = plain.acquire(layer, ids, self.plain)
        self.check_work(layer, expected)
        self.check_tables()
        return expected

    def check_work(self, layer: int, expected: plain.Work) -> None:
        work, log = self.work, self.log
        assert work.order.tolist() == expected.order
        groups = int(work.n_groups)
        assert groups == len(expected.group_slot)
        assert work.group_slot[:groups].tolist() == expected.group_slot
        assert work.group_lo[: groups + 1].tolist() == expected.group_lo
        jobs = int(work.n_jobs)
        assert jobs == int(log.n_jobs[layer]) == len(expected.jobs)
        assert work.job_slot[:jobs].tolist() == [job.slot for job in expected.jobs]
        assert work.job_src[:jobs].tolist() == [job.source for job in expected.jobs]
        assert log.job_slot[layer, :jobs].tolist() == [job.slot for job in expected.jobs]
        assert log.job_key[layer, :jobs].tolist() == [job.key for job in expected.jobs]
        left = int(work.n_cpu)
        assert left == int(log.n_cpu[layer]) == len(expected.cpu)
        assert work.cpu_src[:left].tolist() == [job.source for job in expected.cpu]
        begin, lo = work.cpu_start.tolist(), work.cpu_lo.tolist()
        for n, job in enumerate(expected.cpu):
            size = lo[n + 1] - lo[n]
            assert work.order[begin[n] : begin[n] + size].tolist() == job.routes

    def check_tables(self) -> None:
        assert self.real.slot_of.tolist() == self.plain.slot_of
        assert self.real.owner.tolist() == self.plain.owner
        assert self.real.cursor.tolist() == [self.plain.cursor, len(self.plain.victims)]
        assert self.real.fault.tolist() == list(self.plain.fault)


def empty(
    layers: int, experts: int, *, slots: int, ring: int, victims: list[int] | None = None
) -> plain.Tables:
    keys = layers * experts
    return plain.Tables(
        slot_of=[-1] * keys,
        owner=[-1] * slots,
        source=[0x7F00_0000_0000 + 256 * key for key in range(keys)],
        admit=[True] * keys,
        victims=list(range(slots)) if victims is None else victims,
        ring=ring,
        experts=experts,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[plain.Tables, int, int, list[tuple[int, list[int], list[int]]]]:
    """Tables, rows, k, and steps of (layer, ids, list of victims for the step)."""
    layers, experts = draw(st.integers(1, 3)), draw(st.sampled_from([5, 8]))
    slots, ring = draw(st.integers(1, 8)), draw(st.integers(0, 4))
    rows, k = draw(st.sampled_from([(1, 2), (3, 2)]))  # each shape is compiled anew
    tables = empty(layers, experts, slots=slots, ring=ring)
    tables.admit = draw(
        st.lists(st.booleans(), min_size=layers * experts, max_size=layers * experts)
    )
    for key in draw(st.sets(st.integers(0, layers * experts - 1), max_size=2)):
        tables.source[key] = 0
    if draw(st.booleans()):
        tables.share = [draw(st.integers(0, missing)) for missing in range(experts + 1)]
    steps = []
    for _ in range(draw(st.integers(1, 8))):
        victims = draw(st.permutations(range(slots)))[: draw(st.integers(0, slots))]
        row = st.lists(st.integers(0, experts - 1), min_size=k, max_size=k, unique=True)
        chosen = draw(st.lists(row | st.just([-1] * k), min_size=rows, max_size=rows))
        ids = [i for row_ids in chosen for i in row_ids]
        steps.append((draw(st.integers(0, layers - 1)), ids, victims))
    return tables, rows, k, steps


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases(), relist=st.booleans())
def test_the_kernel_and_the_reference_agree(
    device: str,
    case: tuple[plain.Tables, int, int, list[tuple[int, list[int], list[int]]]],
    relist: bool,
) -> None:
    tables, rows, k, steps = case
    both = Both(tables, rows, k, device)
    both.relist(steps[0][2])
    for layer, ids, victims in steps:
        if relist:
            both.relist(victims)
        both.acquire(layer, ids)


def test_a_miss_takes_the_next_victim_and_evicts_its_owner(device: str) -> None:
    tables = empty(2, 6, slots=3, ring=0, victims=[2, 0, 1])
    tables.owner, tables.slot_of[9], tables.slot_of[4] = [9, 4, -1], 0, 1
    both = Both(tables, 1, 2, device)
    work = both.acquire(0, [5, 1])
    assert [(job.key, job.slot) for job in work.jobs] == [(1, 2), (5, 0)]
    assert tables.slot_of[9] == -1
    assert both.acquire(0, [1, 5]).jobs == []


def test_a_victim_that_the_layer_needs_is_passed_over(device: str) -> None:
    tables = empty(1, 6, slots=3, ring=0, victims=[0, 1, 2])
    tables.owner, tables.slot_of[3] = [3, -1, -1], 0
    both = Both(tables, 1, 2, device)
    assert both.acquire(0, [3, 4]).group_slot == [0, 1]
    assert tables.cursor == 2
    assert both.acquire(0, [3, 4]).jobs == []
    assert tables.cursor == 2


def test_refused_experts_use_the_ring_and_are_forgotten(device: str) -> None:
    tables = empty(1, 6, slots=2, ring=2)
    tables.admit[1] = tables.admit[4] = False
    both = Both(tables, 1, 3, device)
    for _ in range(2):
        work = both.acquire(0, [4, 1, 2])
        assert [job.slot for job in work.jobs if job.key != 2] == [2, 3]
        assert tables.slot_of[1] == tables.slot_of[4] == -1


@pytest.mark.parametrize("admit", [True, False])
def test_each_list_helps_the_other_out(device: str, admit: bool) -> None:
    tables = empty(1, 6, slots=4, ring=2, victims=[3, 1, 0] if not admit else [3])
    tables.admit = [admit] * 6
    both = Both(tables, 1, 3, device)
    slots = [job.slot for job in both.acquire(0, [0, 2, 5]).jobs]
    assert slots == ([3, 4, 5] if admit else [4, 5, 3])
    assert tables.owner[3] == (0 if admit else 5)


def test_overflow_waits_until_both_lists_have_served_their_own(device: str) -> None:
    tables = empty(1, 6, slots=2, ring=3, victims=[1])
    tables.admit = [True, True, False, False, True, True]
    both = Both(tables, 1, 4, device)
    slots = {job.key: job.slot for job in both.acquire(0, [0, 1, 2, 3]).jobs}
    assert slots == {0: 1, 2: 2, 3: 3, 1: 4}


def test_a_fault_changes_nothing_and_stays(device: str) -> None:
    tables = empty(2, 6, slots=2, ring=0)
    tables.source[6 + 3] = 0
    both = Both(tables, 1, 3, device)
    both.acquire(1, [0, 3, 1])  # also too few slots, which is the lesser fault
    assert tables.fault == (Fault.NOT_IN_HOST_MEMORY, 1)
    assert tables.owner == [-1, -1]
    assert both.acquire(0, [0, 1, -1]).group_slot == []
    assert tables.fault == (Fault.NOT_IN_HOST_MEMORY, 1)


def test_too_few_slots(device: str) -> None:
    tables = empty(1, 6, slots=2, ring=1)
    both = Both(tables, 2, 2, device)
    both.acquire(0, [0, 1, 2, 3])
    assert tables.fault == (Fault.NO_SLOT, 0)


def test_ids_that_are_no_expert_choose_nothing(device: str) -> None:
    tables = empty(1, 6, slots=6, ring=0)
    both = Both(tables, 3, 2, device)
    work = both.acquire(0, [6, 2, -1, 7, -(1 << 31), (1 << 31) - 1])
    assert work.order == [1, 0, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("experts", "rows", "k"), [(128, 1, 8), (60, 9, 4), (128, 64, 8), (6, 64, 2), (8, 200, 8)]
)
def test_large_batches(device: str, experts: int, rows: int, k: int) -> None:
    tables = empty(2, experts, slots=experts, ring=experts // 2)
    tables.admit = (torch.rand(2 * experts) < 0.6).tolist()
    both = Both(tables, rows, k, device)
    for step in range(4):
        ids = torch.stack([torch.randperm(experts)[:k] for _ in range(rows)])
        ids[rows - rows // 4 :] = -1
        both.relist(torch.randperm(experts).tolist())
        work = both.acquire(step % 2, ids.view(-1).tolist())
        assert work.group_slot
