"""Copies missing experts from host memory into their slots, as `acquire` asked for, and offers the
CPU those that were left to it.

Owns: the kernel. The GPU reads pinned, mapped host memory itself, so that neither the host nor a
copy engine has to know which experts are missing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained
from moestro.kernels.gpu.cpu_share import CpuLink, no_job, write_job
from moestro.kernels.gpu.tables import LayerWork, StepLog

WORDS = 2048  # int64 words that a program has in flight: 16 KiB
WARPS = 8
# Jobs that are copied at the same time. More are no faster, and what the CPU is to see would have
# to queue behind their reads.
LANES = 4


@triton.jit(do_not_specialize=["layer"])
def _fetch(
    layer,
    n_jobs,
    job_slot,
    job_src,
    slab,
    ended,
    x,
    order,
    n_cpu,
    cpu_src,
    cpu_start,
    cpu_lo,
    cpu_route,
    state,
    header,
    address,
    lo,
    route,
    box_x,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    TIMED: tl.constexpr,
    CHAINED: tl.constexpr,
    SPLIT: tl.constexpr,
    B: tl.constexpr,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    POSTED: tl.constexpr,
    LAYER: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    begin(CHAINED)
    lane, lanes = tl.program_id(1), tl.num_programs(1)
    if SPLIT:  # the first lane does not copy
        if lane == 0:
            write_job(
                layer,
                tl.program_id(0),
                tl.num_programs(0),
                x,
                order,
                n_cpu,
                cpu_src,
                cpu_start,
                cpu_lo,
                cpu_route,
                state,
                header,
                address,
                lo,
                route,
                box_x,
                B,
                H,
                GROUPS,
                POSTED,
                LAYER,
                ROWS,
                EXPERTS,
                ROUTES,
                BLOCK,
                CHUNK,
            )
            return
        lane -= 1
        lanes -= 1
    jobs = tl.load(n_jobs)
    for job in range(lane, jobs, lanes):
        # Blobs start on 256 bytes, which makes the loads 16 bytes wide.
        src = tl.multiple_of(tl.load(job_src + job).to(tl.pointer_type(tl.int64)), 16)
        dst = slab + tl.load(job_slot + job).to(tl.int64) * SIZE
        for at in range(tl.program_id(0) * WORDS, SIZE, tl.num_programs(0) * WORDS):
            word = at + tl.arange(0, WORDS)
            if SIZE % WORDS == 0:
                tl.store(dst + word, tl.load(src + word))
            else:
                tl.store(dst + word, tl.load(src + word, mask=word < SIZE), mask=word < SIZE)
    if TIMED:
        tl.debug_barrier()
        now = tl.extra.cuda.globaltimer()
        tl.atomic_max(ended + layer, now, mask=lane < jobs)


def fetch(
    layer: int,
    work: LayerWork,
    slab: torch.Tensor,
    nbytes: int,
    log: StepLog,
    *,
    cpu: CpuLink | None = None,
    x: torch.Tensor | None = None,
    programs: int = 16,
    timed: bool = False,
) -> None:
    """Copy every job's blob of `nbytes` from its host address to its row of `slab`.

    slab uint8 [S + R, nbytes], contiguous; nbytes a multiple of 256; addresses aligned to 16 bytes
    and readable by the GPU. `programs` share the copy of one blob. `cpu` gets what
    `acquire` left to the CPU, with its rows of x [B, H]. `timed` notes in `log.ended`
    when the last one was done; it has no effect in Triton's interpreter.
    """
    assert nbytes % 256 == 0 and slab.shape[1] == nbytes and slab.is_contiguous()
    assert cpu is None or x is not None
    job = no_job(work) if cpu is None or x is None else cpu.job(x, work)
    _fetch[(programs, min(work.groups, LANES) + (cpu is not None))](
        layer,
        work.n_jobs,
        work.job_slot,
        work.job_src,
        slab.view(torch.int64),
        log.ended,
        SIZE=nbytes // 8,
        WORDS=WORDS,
        SPLIT=cpu is not None,
        TIMED=timed and not triton.knobs.runtime.interpret,
        num_warps=WARPS,
        **job,
        **chained(),
    )
