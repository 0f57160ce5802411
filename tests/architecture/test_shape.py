"""Sizes and names: files stay small, and nothing is called what it should not be."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import moestro

PACKAGE = Path(moestro.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LIMIT = 400  # lines; 300 is the aim
FORBIDDEN_NAMES = {"utils", "util", "helpers", "common", "misc", "base"}


def shown(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_no_file_is_over_the_limit() -> None:
    lines = {shown(p): len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    assert {name: count for name, count in lines.items() if count > LIMIT} == {}


@pytest.mark.parametrize("path", FILES, ids=shown)
def test_file(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert path.stem not in FORBIDDEN_NAMES
    assert ast.get_docstring(tree), "a module says what it owns"
    based = [n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    assert [name for name in based if name.startswith("Base")] == []
    if any(isinstance(n, ast.FunctionDef | ast.ClassDef | ast.AnnAssign) for n in tree.body):
        assert "from __future__ import annotations" in path.read_text(encoding="utf-8")


def test_no_mutable_state_at_module_level() -> None:
    """No `global` anywhere, and no list, dict or set at module level that is not a constant."""
    found = []
    for path in FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{shown(path)}: global" for n in ast.walk(tree) if isinstance(n, ast.Global)]
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            target = node.target if isinstance(node, ast.AnnAssign) else target
            value = getattr(node, "value", None)
            mutable = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp)
            if isinstance(target, ast.Name) and mutable:
                name = target.id
                if name != name.upper() and name != "__all__":
                    found.append(f"{shown(path)}: {name}")
    assert found == []


def test_no_machine_paths() -> None:
    root = PACKAGE.parent
    texts = [*FILES, *root.glob("*.md"), root / "Makefile", root / "Dockerfile"]
    found = [p.name for p in texts if "/work/" in p.read_text(encoding="utf-8")]
    assert found == []
