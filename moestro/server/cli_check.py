"""`moestro check`: what this machine is, what a model would get of it, which kernels would run.

Owns: the report. Does not own the numbers: `engine.build.describe` plans memory and picks
kernels exactly as the engine does when it starts.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moestro import __version__, log
from moestro.config import Config
from moestro.server.cli_model import resolve
from moestro.server.cli_show import memory_table, show_size

# Asked in a process of its own: loading torch takes seconds, and a broken driver may crash it.
_ASK_TORCH = """
import json, torch
gpus = []
for index in range(torch.cuda.device_count()):
    seen = torch.cuda.get_device_properties(index)
    gpus.append({"name": seen.name, "memory": seen.total_memory})
print(json.dumps({"version": torch.__version__, "gpus": gpus}))
"""


def check(config: Config) -> int:
    """Print the report; 0 when the model could be served, else the error says why."""
    log.setup(config.log_level, form=config.log_format)
    for name, value in machine().items():
        print(f"{name:<10}{value}", flush=True)
    model = resolve(config)
    from moestro.engine.build import describe

    plan = describe(config, model.path)
    print(f"{'model':<10}{', '.join(model.names)} ({model.path})")
    print(memory_table(plan["memory"], plan["notes"]))
    print(kernel_table(plan["kernels"]))
    return 0


def kernel_table(kernels: Mapping[str, tuple[str, str]]) -> str:
    """Which kernel serves which op, and why that one."""
    width = max(map(len, kernels), default=0)
    rows = [f"  {op:<{width}}  {name}: {reason}" for op, (name, reason) in kernels.items()]
    return "\n".join(["Kernels", *rows])


def machine() -> dict[str, str]:
    """Facts about this machine, as name -> text."""
    torch = _torch()
    gpus = [f"{gpu['name']}, {show_size(gpu['memory'])}" for gpu in torch.get("gpus", [])]
    return {
        "moestro": __version__,
        "python": f"{platform.python_version()}, torch {torch.get('version', 'cannot be loaded')}",
        "cpu": f"{_cpu_name()}, {len(os.sched_getaffinity(0))} cores",
        "memory": _memory(),
        "gpu": "; ".join(gpus) or "none that torch can use",
    }


def _torch() -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=120
        )
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired):
        return {}
    return answer


def _cpu_name() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine() or "unknown"


def _memory() -> str:
    kib = {
        name: int(rest.split()[0])
        for name, _, rest in (line.partition(":") for line in _read("/proc/meminfo").splitlines())
    }
    total, free = kib.get("MemTotal", 0) * 1024, kib.get("MemAvailable", 0) * 1024
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    note = f", limited to {show_size(int(limit))}" if limit.isdigit() and int(limit) < total else ""
    return f"{show_size(total)}, {show_size(free)} available{note}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
