"""Copies missing experts from host memory into their slots, as `acquire` asked for.

Owns: the kernel. The GPU reads pinned, mapped host memory itself, so that neither the host nor a
copy engine has to know which experts are missing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from moestro.kernels.gpu.chain import begin, chained
from moestro.kernels.gpu.tables import LayerWork, StepLog

WORDS = 2048  # int64 words that a program has in flight: 16 KiB
WARPS = 8
LANES = 32  # jobs that are copied at the same time


@triton.jit(do_not_specialize=["layer"])
def _fetch(
    layer,
    n_jobs,
    job_slot,
    job_src,
    slab,
    ended,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TIMED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    begin(CHAINED)
    jobs = tl.load(n_jobs)
    for job in range(tl.program_id(1), jobs, tl.num_programs(1)):
        # Blobs start on 256 bytes, which makes the loads 16 bytes wide.
        src = tl.multiple_of(tl.load(job_src + job).to(tl.pointer_type(tl.int64)), 16)
        dst = slab + tl.load(job_slot + job).to(tl.int64) * SIZE
        for lo in range(tl.program_id(0) * BLOCK, SIZE, tl.num_programs(0) * BLOCK):
            word = lo + tl.arange(0, BLOCK)
            if SIZE % BLOCK == 0:
                tl.store(dst + word, tl.load(src + word))
            else:
                tl.store(dst + word, tl.load(src + word, mask=word < SIZE), mask=word < SIZE)
    if TIMED:
        tl.debug_barrier()
        now = tl.extra.cuda.globaltimer()
        tl.atomic_max(ended + layer, now, mask=tl.program_id(1) < jobs)


def fetch(
    layer: int,
    work: LayerWork,
    slab: torch.Tensor,
    nbytes: int,
    log: StepLog,
    *,
    programs: int = 16,
    timed: bool = False,
) -> None:
    """Copy every job's blob of `nbytes` from its host address to its row of `slab`.

    slab uint8 [S + R, nbytes], contiguous; nbytes a multiple of 256; addresses aligned to 16 bytes
    and readable by the GPU. `programs` share the copy of one blob. `timed` notes in `log.ended`
    when the last one was done; it has no effect in Triton's interpreter.
    """
    assert nbytes % 256 == 0 and slab.shape[1] == nbytes and slab.is_contiguous()
    _fetch[(programs, min(work.groups, LANES))](
        layer,
        work.n_jobs,
        work.job_slot,
        work.job_src,
        slab.view(torch.int64),
        log.ended,
        SIZE=nbytes // 8,
        BLOCK=WORDS,
        TIMED=timed and not triton.knobs.runtime.interpret,
        num_warps=WARPS,
        **chained(),
    )
