"""What only decides must not load torch: neither by its own imports nor by its package's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import moestro

PACKAGE = Path(moestro.__file__).parent

PURE = [
    "moestro.types",
    "moestro.errors",
    "moestro.stats",
    "moestro.config",
    "moestro.log",
    "moestro.demo",
    "moestro.engine.messages",
    "moestro.engine.handle",
    "moestro.kv_cache.blocks",
    "moestro.kv_cache.groups",
    "moestro.kv_cache.manager",
    "moestro.kv_cache.prefix",
    "moestro.kv_cache.spec",
    "moestro.expert_cache.layout",
    "moestro.expert_cache.policy",
    "moestro.expert_cache.rebatch",
    "moestro.expert_cache.replay",
    "moestro.expert_cache.residency",
    "moestro.expert_cache.simulate",
    "moestro.expert_cache.trace",
]
PURE_PACKAGES = ["grammar", "scheduler", "server", "expert_cache/policies"]

# One process for all: after each import it looks whether torch came along.
PROBE = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name)
        break
"""


def pure_modules() -> list[str]:
    """PURE, and every module of PURE_PACKAGES."""
    found = list(PURE)
    for folder in PURE_PACKAGES:
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
            found.append(".".join(parts).removesuffix(".__init__"))
    return found


def first_that_loads_torch(modules: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *modules],
        capture_output=True,
        text=True,
        check=False,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_pure_modules_do_not_load_torch() -> None:
    assert first_that_loads_torch(pure_modules()) == ""


def test_the_probe_sees_torch() -> None:
    assert first_that_loads_torch(["moestro.errors", "moestro.kernels.reference"]) != ""


def test_package_inits_are_light() -> None:
    # Importing one pure module runs the __init__ of each package above it.
    folders = sorted(path.parent for path in PACKAGE.rglob("__init__.py"))
    names = [".".join(folder.relative_to(PACKAGE.parent).parts) for folder in folders]
    assert first_that_loads_torch(names) == ""
