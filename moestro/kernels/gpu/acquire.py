"""Gives every expert that a layer routed to a slot, without asking the host.

Owns: the kernel that turns routed ids into groups, copy jobs and table changes. Does not own: which
experts are worth keeping; the host says so beforehand through `victims` and `admit`. The meaning is
`reference_tables.acquire`.

The first program keeps the books. Each of the others puts the routes of a few experts in order, the
last one also those of none; that needs the ids alone, so no program waits for another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained
from moestro.kernels.gpu.tables import CacheTables, LayerWork, StepLog

CHUNK = 1024  # routes that are looked at together, at most
SHARE = 4  # experts whose routes one program sorts
WARPS = 4
FEW = 4  # routes that cost the CPU no more than one: it is bound by reading the weights


@triton.jit
def _load_ids(ids, route, P: tl.constexpr, E: tl.constexpr):
    """The experts of routes; E for none, and E + 1 where there is no such route."""
    found = tl.load(ids + route, mask=route < P, other=E + 1)
    return tl.where((route < P) & ((found < 0) | (found > E)), E, found)


@triton.jit
def _count_routes(ids, P: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """int32 [BLOCK]: routes of each expert."""
    counts = tl.zeros((BLOCK,), tl.int32)
    for lo in range(0, P, CHUNK):
        found = _load_ids(ids, lo + tl.arange(0, CHUNK), P, E)
        counts += tl.histogram(found, BLOCK, mask=found < E)
    return counts


@triton.jit
def _sort_routes(
    ids, order, first, P: tl.constexpr, E: tl.constexpr, CHUNK: tl.constexpr, SHARE: tl.constexpr
):
    """Write the part of `order` that holds the routes of SHARE experts; E stands for none."""
    expert = first + tl.arange(0, SHARE)[:, None]
    place = tl.full((SHARE,), -1, tl.int32)
    for lo in range(0, P, CHUNK):
        found = _load_ids(ids, lo + tl.arange(0, CHUNK)[None, :], P, E)
        place += tl.sum((found < expert).to(tl.int32), 1)
    for lo in range(0, P, CHUNK):
        route = lo + tl.arange(0, CHUNK)[None, :]
        found = _load_ids(ids, route, P, E)
        own = (found == expert).to(tl.int32)
        at = order + place[:, None] + tl.cumsum(own, 1)
        tl.store(at, tl.broadcast_to(route, (SHARE, CHUNK)), mask=(own != 0) & (found <= E))
        place += tl.sum(own, 1)


@triton.jit
def _leave_to_cpu(miss, counts, may_enter, expert, share, BLOCK: tl.constexpr, FEW: tl.constexpr):
    """Those of the missing experts that the CPU computes: those with few routes before those with
    many, those that may not enter the cache before those that may, then ascending."""
    worth = (counts - 1) // FEW * 2 + may_enter.to(tl.int32)
    place = tl.where(miss, worth * BLOCK + expert, 0x7FFFFFFF)
    rank = tl.sum((place[None, :] < place[:, None]).to(tl.int32), 1)
    return miss & (rank < tl.load(share + tl.sum(miss.to(tl.int32), 0)))


@triton.jit
def _pack(counts, needed, miss, admitted, lost):
    """One int64 with a field for each, so that one scan ranks and one sum counts all of them:
    counts in 16 bits, then 12 bits each."""
    high = needed.to(tl.int64) | (miss.to(tl.int64) << 12)
    high |= (admitted.to(tl.int64) << 24) | (lost.to(tl.int64) << 36)
    return counts.to(tl.int64) | (high << 16)


@triton.jit
def _field(packed, n: tl.constexpr):
    """The n-th field after the counts."""
    return ((packed >> (16 + 12 * n)) & 0xFFF).to(tl.int32)


@triton.jit(do_not_specialize=["layer", "S", "R"])
def _acquire(
    layer,
    ids,
    slot_of,
    owner,
    source,
    admit,
    victims,
    cursor,
    fault,
    n_groups,
    group_slot,
    group_lo,
    order,
    n_jobs,
    job_slot,
    job_src,
    taken,
    log_jobs,
    log_key,
    log_slot,
    log_started,
    share,
    n_cpu,
    cpu_src,
    cpu_start,
    cpu_lo,
    log_cpu,
    S,
    R,
    P: tl.constexpr,
    E: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    SHARE: tl.constexpr,
    SPLIT: tl.constexpr,
    FEW: tl.constexpr,
    TIMED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    if tl.program_id(0) > 0:
        _sort_routes(ids, order, (tl.program_id(0) - 1) * SHARE, P, E, CHUNK, SHARE)
        return
    # All loads come first, so that their latencies overlap. A layer passes over at most as many
    # victims as it has hits, so this window suffices.
    expert = tl.arange(0, BLOCK)
    key = layer * E + expert
    w = tl.arange(0, WINDOW)
    old_fault = tl.load(fault)
    first = tl.load(cursor)
    length = tl.load(cursor + 1)
    slot = tl.load(slot_of + key, mask=expert < E, other=0)
    src = tl.load(source + key, mask=expert < E, other=0)
    may_enter = tl.load(admit + key, mask=expert < E, other=0) != 0
    at = (first + w) % tl.maximum(length, 1)
    victim = tl.load(victims + at, mask=w < length, other=-1)
    old = tl.load(owner + victim, mask=victim >= 0, other=-1)

    counts = _count_routes(ids, P, E, BLOCK, CHUNK)
    needed = counts > 0
    miss = needed & (slot < 0)
    nowhere = miss & (src == 0)
    if SPLIT:
        cpu = _leave_to_cpu(miss, counts, may_enter, expert, share, BLOCK, FEW)
        miss = miss & ~cpu
    admitted = miss & may_enter
    packed = _pack(counts, needed, miss, admitted, nowhere)
    total = tl.sum(packed, 0)
    before = tl.cumsum(packed, 0) - packed
    starts, routed = (before & 0xFFFF).to(tl.int32), (total & 0xFFFF).to(tl.int32)

    local = old - layer * E
    here = (local >= 0) & (local < E)
    busy = here & (tl.gather(needed.to(tl.int32), tl.where(here, local, 0), 0) != 0)
    usable = (w < length) & ~busy
    v_rank = tl.cumsum(usable.to(tl.int32), 0) - usable.to(tl.int32)
    n_victims = tl.sum(usable.to(tl.int32), 0)

    # Each list serves its own first, and what is left serves the overflow of the other. Without a
    # fault only one of them overflows, and the other served its own in full.
    group, job, a_rank = _field(before, 0), _field(before, 1), _field(before, 2)
    n_missing, n_admitted = _field(total, 1), _field(total, 2)
    r_rank, n_refused = job - a_rank, n_missing - n_admitted
    late = a_rank - n_victims
    early = r_rank - R
    from_list = miss & tl.where(admitted, late < 0, early >= 0)
    nth_victim = tl.where(admitted, a_rank, n_admitted + early)
    nth_ring = tl.where(admitted, n_refused + late, r_rank)
    n_taken = tl.minimum(n_admitted, n_victims) + tl.maximum(n_refused - R, 0)

    lost = _field(total, 3) > 0
    short = n_missing > n_victims + R
    code = tl.where(lost, 1, tl.where(short, 2, 0))
    fine = (old_fault | code) == 0
    jobs = tl.where(fine, n_missing, 0)
    groups = tl.where(fine, _field(total, 0), 0)
    n_taken = tl.where(fine, n_taken, 0)
    served = group < groups  # in place of `& fine`: the interpreter of Triton 3.9 mixes up dtypes

    used = usable & (v_rank < n_taken)
    tl.store(taken + v_rank, victim, mask=used)
    tl.debug_barrier()  # every thread has read the tables and written its victims
    entered = from_list & served
    new = tl.load(taken + nth_victim, mask=entered, other=0)
    slot = tl.where(miss, tl.where(from_list, new, S + nth_ring), slot)

    tl.store(slot_of + old, -1, mask=used & (old >= 0))
    tl.store(slot_of + key, slot, mask=entered)
    tl.store(owner + slot, key, mask=entered)
    passed = tl.max(tl.where(used, w + 1, 0), 0)
    tl.store(cursor, (first + passed) % tl.maximum(length, 1))
    broken = tl.where(old_fault == 0, code, 0) != 0
    tl.store(fault, code, mask=broken)
    tl.store(fault + 1, layer, mask=broken)

    tl.store(group_slot + group, slot, mask=needed & served)
    tl.store(group_lo + group, starts, mask=needed & served)
    tl.store(group_lo + groups, tl.where(fine, routed, 0))
    tl.store(n_groups, groups)

    wanted = miss & served
    tl.store(job_slot + job, slot, mask=wanted)
    tl.store(job_src + job, src, mask=wanted)
    tl.store(n_jobs, jobs)
    tl.store(log_slot + layer * G + job, slot, mask=wanted)
    tl.store(log_key + layer * G + job, key, mask=wanted)
    tl.store(log_jobs + layer, jobs)
    busy_cpu = 0
    if SPLIT:
        chosen = (cpu & served).to(tl.int32)
        routes = chosen * counts
        nth = tl.cumsum(chosen, 0) - chosen
        busy_cpu = tl.sum(chosen, 0)
        tl.store(cpu_src + nth, src, mask=chosen != 0)
        tl.store(cpu_start + nth, starts, mask=chosen != 0)
        tl.store(cpu_lo + nth, tl.cumsum(routes, 0) - routes, mask=chosen != 0)
        tl.store(cpu_lo + busy_cpu, tl.sum(routes, 0))
        tl.store(n_cpu, busy_cpu)
        tl.store(log_cpu + layer, busy_cpu)
    if TIMED:
        tl.store(log_started + layer, tl.extra.cuda.globaltimer(), mask=jobs + busy_cpu > 0)


def acquire(
    layer: int,
    ids: torch.Tensor,
    tables: CacheTables,
    *,
    work: LayerWork,
    log: StepLog,
    split: bool = False,
    timed: bool = False,
) -> None:
    """Give the experts of a layer their slots; write `work`, and the layer's row of `log`.

    ids int32 [B, K], contiguous; -1 and what is not below E choose nothing. layer counts MoE
    layers. `work` must have been made for B * K routes and `log` for the same number of groups.
    After a fault (`gpu.tables.Fault`), now or earlier, there are no groups and no jobs and the
    tables stay as they are. With `split` some of the missing experts, as many as `tables.share`
    says, get no slot: they are left to the CPU. `timed` notes when the jobs were known; it has no
    effect in Triton's interpreter, which has no timer.
    """
    routes, groups = ids.numel(), work.groups
    assert ids.is_contiguous() and ids.dtype == torch.int32 and work.routes == routes
    assert routes < 1 << 16 and tables.experts < 1 << 12  # the fields of _pack
    assert log.job_key.shape[1] == groups == min(routes, tables.experts)
    _acquire[(1 + triton.cdiv(tables.experts + 1, SHARE),)](
        layer,
        ids,
        tables.slot_of,
        tables.owner,
        tables.source,
        tables.admit,
        tables.victims,
        tables.cursor,
        tables.fault,
        work.n_groups,
        work.group_slot,
        work.group_lo,
        work.order,
        work.n_jobs,
        work.job_slot,
        work.job_src,
        work.taken,
        log.n_jobs,
        log.job_key,
        log.job_slot,
        log.started,
        tables.share,
        work.n_cpu,
        work.cpu_src,
        work.cpu_start,
        work.cpu_lo,
        log.n_cpu,
        tables.slots,
        tables.ring,
        P=routes,
        E=tables.experts,
        G=groups,
        BLOCK=triton.next_power_of_2(tables.experts),
        WINDOW=triton.next_power_of_2(groups),
        CHUNK=min(CHUNK, max(32 * WARPS, triton.next_power_of_2(routes))),
        SHARE=SHARE,
        SPLIT=split,
        FEW=FEW,
        TIMED=timed and not triton.knobs.runtime.interpret,
        num_warps=WARPS,
        **chained(),
    )
