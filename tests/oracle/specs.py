"""The tiny checkpoints of the parity tests, one row each.

Owns: which variants are covered, and the seeds that give an oracle worth having. `find_seeds`
found those: of 16 x 64 greedy choices no two tokens may be near a tie, nor may the routers be,
nor the text repeat itself. Near ties do not get rarer by scaling: of a thousand gaps between the
two best of 288 logits the smallest is typically 0.0002 of their spread; float32 moves logits by
0.000005 of it.
"""

from __future__ import annotations

from tests.oracle.golden import Golden
from tests.oracle.tiny import Spec

LOGIT_MARGIN = 0.0007  # of the logits' spread
ROUTER_MARGIN = 3e-5
FEWEST_DISTINCT = 12

SPECS = {
    # The first of each family goes through every case of the parity matrix, the others through
    # the main ones.
    "qwen3": Spec("qwen3_moe", 12),
    "qwen3-dense-layer": Spec("qwen3_moe", 30, layers=4, mlp_only_layers=(1,), top_k=3, shards=3),
    "qwen3-every-other": Spec(
        "qwen3_moe", 3, layers=4, sparse_step=2, experts=12, top_k=4, norm_topk=False
    ),
    "qwen3-tied-packed": Spec(
        "qwen3_moe", 11, tied=True, packed=True, v5_config=True, kv_heads=1, head_width=24
    ),
    "qwen3-bf16": Spec(
        "qwen3_moe", 23, hidden=64, layers=2, experts=16, top_k=8, dtype="bfloat16", shards=2
    ),
    "qwen3-wide-head": Spec(
        "qwen3_moe", 9, hidden=32, layers=2, heads=2, kv_heads=2, head_width=32, top_k=1,
        rope_theta=1e6,
    ),
    "olmoe": Spec("olmoe", 0, kv_heads=4, norm_topk=False),
    "olmoe-clip": Spec("olmoe", 2, kv_heads=4, norm_topk=False, extra=(("clip_qkv", 1.5),)),
    "olmoe-grouped": Spec("olmoe", 10, kv_heads=2, experts=16, top_k=8, layers=2, norm_topk=True),
    "olmoe-tied-sharded": Spec(
        "olmoe", 9, kv_heads=4, tied=True, shards=4, norm_topk=False, hidden=64, top_k=4
    ),
    "olmoe-packed-bf16": Spec(
        "olmoe", 31, kv_heads=1, packed=True, v5_config=True, dtype="bfloat16", norm_topk=False,
        extra=(("rope_theta", 10000.0),),  # some files have both spellings
    ),
    "mixtral": Spec("mixtral", 1),
    "mixtral-sharded": Spec("mixtral", 7, shards=5, experts=4, top_k=2, intermediate=48),
    "mixtral-tied": Spec("mixtral", 21, tied=True, kv_heads=4, rope_theta=1e6, layers=2),
    "mixtral-one-kv-head": Spec("mixtral", 1, kv_heads=1, head_width=24, top_k=3, experts=6),
    "mixtral-window": Spec("mixtral", 1, extra=(("sliding_window", 24),)),
    "mixtral-packed-bf16": Spec(
        "mixtral", 3, packed=True, v5_config=True, dtype="bfloat16", hidden=64, top_k=1
    ),
}  # fmt: skip

FULL_MATRIX = ("qwen3", "olmoe", "mixtral")


def weakness(golden: Golden) -> str | None:
    """Why `golden` is no good oracle, or None when it is."""
    if golden.logit_margin < LOGIT_MARGIN:
        return f"two tokens are only {golden.logit_margin} apart"
    if golden.router_margin < ROUTER_MARGIN:
        return f"two experts are only {golden.router_margin} apart"
    if golden.fewest_distinct < FEWEST_DISTINCT:
        return f"an answer has only {golden.fewest_distinct} distinct tokens"
    return None
