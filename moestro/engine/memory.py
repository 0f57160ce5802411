"""How memory is split, by arithmetic alone.

Owns: the one plan over dense weights, workspace, KV blocks, expert slots and the host arena.
Nothing is allocated here, so `moestro check` can print a plan for any model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moestro.config import Config
from moestro.engine.models.spec import ModelSpec
from moestro.errors import ConfigError, OutOfMemory
from moestro.expert_cache.layout import DTYPE_BYTES, ExpertLayout
from moestro.kv_cache.groups import LayerGroups

MIN_STAGING = 2  # slots: one is computed with while the next is filled
MAX_STAGING = 8
MIN_ARENA = 4  # host entries: what can be in flight between disk and slots at once
AUTO_SHARE = 0.5  # of the memory that is free, for each of the two pools when not told


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes and counts that hold for the life of the engine."""

    dense: int
    workspace: int
    kv: int
    slots_bytes: int
    host_bytes: int
    blocks: int
    block_size: int
    groups: LayerGroups  # that the KV blocks serve
    kv_tokens: int  # of the longest sequence that the KV blocks hold
    slots: int  # staging included
    staging: int
    host_entries: int
    experts: int
    max_model_len: int
    ring: int = 0  # slots, of those a decode step must not keep; on a GPU, beside `staging`
    notes: tuple[str, ...] = field(default=())

    @property
    def device(self) -> int:
        """Bytes of the device pool."""
        return self.dense + self.workspace + self.kv + self.slots_bytes

    def table(self) -> dict[str, int]:
        """For people: what goes where, in bytes."""
        return {
            "dense weights": self.dense,
            "workspace": self.workspace,
            "KV cache": self.kv,
            "expert slots": self.slots_bytes,
            "device pool": self.device,
            "host arena": self.host_bytes,
        }


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the things to be placed, and what must be placed at least."""

    dense: int
    workspace: int
    block: int  # one KV block
    groups: LayerGroups
    run: int  # tokens of a prompt that are computed together at most
    blob: int  # one expert
    experts: int
    free: int  # what the machine has left
    most: int  # slots that hold all experts, staging included

    @property
    def fixed(self) -> int:
        return self.dense + self.workspace

    def blocks(self, tokens: int) -> int:
        """KV blocks of one sequence of so many tokens."""
        return self.groups.most_blocks(tokens, self.run)

    def tokens(self, blocks: int) -> int:
        """Of the longest sequence for which so many KV blocks suffice."""
        return self.groups.longest(blocks, self.run)


def plan_memory(
    spec: ModelSpec,
    layout: ExpertLayout,
    config: Config,
    free: int,
    *,
    workspace: int | None = None,
    free_host: int | None = None,
    all_slots: int | None = None,
    windows: bool = True,
    dense: int | None = None,
) -> MemoryPlan:
    """Split memory for `spec`; `free` is what the machine has left. OutOfMemory says what lacks.

    On a GPU `free_host` is apart from `free`, and `workspace` and the slots that hold all experts,
    `all_slots`, are not those of a CPU. `dense` are the bytes of a quantised checkpoint's dense
    weights. On a GPU layers that see a window keep all (`windows` off).

    There are as many KV blocks as one sequence of --kv-cache-tokens tokens takes, where windowed
    layers take those of their window and of what is computed together. Without that flag: those of
    every sequence at 512 tokens, or of two sequences of the longest.
    """
    notes: list[str] = []
    size = DTYPE_BYTES[layout.dtype]
    length = _model_length(spec, config)
    groups = spec.groups(size, config.block_size, length, windows=windows)
    sizes = _Sizes(
        dense=dense_bytes(spec, size) if dense is None else dense,
        workspace=workspace or workspace_bytes(spec, config.max_sweep_tokens, size),
        block=groups.block.block_bytes,
        groups=groups,
        run=config.max_sweep_tokens,
        blob=layout.nbytes,
        experts=len(spec.moe_layers) * spec.moe.experts,
        free=free,
        most=all_slots or len(spec.moe_layers) * spec.moe.experts + MIN_STAGING,
    )
    if config.max_model_len is None and length < spec.max_positions:
        notes.append(
            f"context is {length} tokens, up to which the model's rotary frequencies are one set; "
            f"--max-model-len up to {spec.max_positions} takes the other set for all sequences"
        )
    wanted = _blocks_wanted(sizes, config, length)
    budget = config.gpu_memory or _automatic_budget(sizes, config, wanted)
    blocks, length = _blocks(sizes, config, wanted, length, budget - sizes.fixed, notes)
    slots = _slots(sizes, config, budget - sizes.fixed - blocks * sizes.block)
    staging = min(MAX_STAGING, max(MIN_STAGING, slots // 8))
    if slots >= sizes.most:
        slots, staging = sizes.most, sizes.most - sizes.experts
    left = free - sizes.fixed - blocks * sizes.block - slots * sizes.blob
    host = _host_entries(sizes, config, slots - staging, left if free_host is None else free_host)
    return MemoryPlan(
        dense=sizes.dense,
        workspace=sizes.workspace,
        kv=blocks * sizes.block,
        slots_bytes=slots * sizes.blob,
        host_bytes=host * sizes.blob,
        blocks=blocks,
        block_size=config.block_size,
        groups=groups,
        kv_tokens=min(sizes.tokens(blocks), max(length, blocks * config.block_size)),
        slots=slots,
        staging=staging,
        host_entries=host,
        experts=sizes.experts,
        max_model_len=length,
        notes=tuple(notes),
    )


def dense_bytes(spec: ModelSpec, size: int) -> int:
    """Bytes of everything that is not a routed expert, in elements of `size` bytes."""
    hidden = spec.hidden
    total = spec.vocab_size * hidden * (1 if spec.tied_head else 2) + 2 * hidden
    total += spec.vocab_size if spec.head_bias else 0
    wide = 0  # elements of 4 bytes
    for layer in spec.layers:
        moe = layer.moe
        total += layer.attention.elements(hidden) + 3 * hidden  # with norms and their biases
        if moe is None:
            total += 3 * hidden * layer.intermediate
            continue
        if moe.shared is not None:
            total += 3 * hidden * moe.shared.intermediate + hidden
        if moe.wide:
            wide += moe.experts * hidden
        else:
            total += moe.experts * hidden
        wide += moe.experts if moe.biased else 0
    return total * size + wide * 4


def workspace_bytes(spec: ModelSpec, tokens: int, size: int) -> int:
    """Bytes of activations while `tokens` tokens sweep, the widest layer at a time."""
    widest = max(layer.attention.activations for layer in spec.layers)
    width = 5 * spec.hidden + widest + 2 * spec.moe.experts
    return tokens * width * size + 4 * spec.vocab_size * 64


def free_memory() -> int:
    """Bytes that this machine (or its control group) has left."""
    info = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    free = int(info["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip() != "max":
        free = min(free, int(limit.read_text()) - int(used.read_text()))
    return max(free, 0)


def _model_length(spec: ModelSpec, config: Config) -> int:
    wanted = config.max_model_len or spec.usual_positions
    if wanted > spec.max_positions:
        raise ConfigError(
            f"--max-model-len is {wanted}, but the model knows only {spec.max_positions} positions",
            param="max_model_len",
        )
    return wanted


def _blocks_wanted(sizes: _Sizes, config: Config, length: int) -> int:
    if config.kv_cache_tokens is not None:
        return sizes.blocks(config.kv_cache_tokens)
    return max(2 * sizes.blocks(length), config.max_num_seqs * sizes.blocks(min(length, 512)))


def _automatic_budget(sizes: _Sizes, config: Config, blocks: int) -> int:
    """Room for everything that is wanted, or half of what is free; what flags fix counts whole."""
    slots = config.expert_slots or sizes.most
    wish = sizes.fixed + blocks * sizes.block + slots * sizes.blob
    explicit = config.expert_slots is not None or config.kv_cache_tokens is not None
    return min(wish, int(sizes.free * (1.0 if explicit else AUTO_SHARE)))


def _blocks(
    sizes: _Sizes, config: Config, wanted: int, length: int, left: int, notes: list[str]
) -> tuple[int, int]:
    """KV blocks and context length out of `left` bytes for KV and slots."""
    most = (left - (config.expert_slots or MIN_STAGING) * sizes.blob) // sizes.block
    longest, least = sizes.blocks(length), sizes.blocks(1)
    if most < least:
        _short((least - most) * sizes.block, "--gpu-memory", "raise it")
    if config.kv_cache_tokens is not None:
        if wanted > most:
            lack = (wanted - most) * sizes.block
            _short(lack, "--kv-cache-tokens", "lower it or raise --gpu-memory")
        return wanted, min(length, sizes.tokens(wanted))
    # Half at most, unless all experts fit beside more; but one sequence of full length.
    spare = left - sizes.most * sizes.blob
    share = max(left // 2, spare) // sizes.block
    blocks = min(wanted, most, max(share, longest))
    if blocks < longest and config.max_model_len is not None:
        lack = (longest - blocks) * sizes.block
        _short(lack, "--gpu-memory", f"raise it or lower --max-model-len ({length})")
    fits = sizes.tokens(blocks)
    if fits < length:
        notes.append(f"context cut from {length} to {fits} tokens to fit memory")
    return blocks, min(length, fits)


def _slots(sizes: _Sizes, config: Config, left: int) -> int:
    most = max(0, left) // sizes.blob
    wanted = config.expert_slots
    if wanted is None:
        if most < MIN_STAGING:
            lack = MIN_STAGING * sizes.blob - left
            _short(lack, "--gpu-memory", "raise it or lower --kv-cache-tokens")
        return min(sizes.most, most)
    if wanted < MIN_STAGING:
        raise ConfigError(
            f"--expert-slots is {wanted}, the minimum is {MIN_STAGING}", param="expert_slots"
        )
    if wanted > most:
        lack = wanted * sizes.blob - left
        _short(lack, "--expert-slots", "lower it or raise --gpu-memory")
    return wanted


def _host_entries(sizes: _Sizes, config: Config, cached: int, left: int) -> int:
    least = MIN_ARENA * sizes.blob
    wanted = config.host_memory
    if wanted is not None:
        if wanted < least:
            _short(least - wanted, "--host-memory", "raise it")
        if wanted > left and sizes.experts * sizes.blob > left:
            _short(wanted - left, "--host-memory", "lower it")
        return max(MIN_ARENA, min(sizes.experts, wanted // sizes.blob))
    if cached >= sizes.experts:  # slots hold them all; the arena is only passed through
        return MIN_ARENA
    return max(MIN_ARENA, min(sizes.experts, int(left * AUTO_SHARE) // sizes.blob))


def _short(lack: int, flag: str, advice: str) -> None:
    raise OutOfMemory(
        f"memory does not suffice: {lack:,} bytes ({lack / 2**20:.1f} MiB) are missing; "
        f"{flag}: {advice}",
        param=flag.removeprefix("--").replace("-", "_"),
    )
