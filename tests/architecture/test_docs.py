"""The documents at the root are true of this tree."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path

import pytest

from tools.flags_table import with_table
from tools.models_table import PAGE, page

ROOT = Path(__file__).parents[2]
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")

# A name in backticks, dotted or not, perhaps called: `scheduler.limits.check`, `run()`.
NAME = re.compile(r"`([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*)(?:\(\))?`")
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|toml|md))`")


def prose(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@cache
def modules() -> dict[str, Path]:
    """Dotted name without the leading package -> file."""
    found = {}
    for path in sorted((ROOT / "moestro").rglob("*.py")):
        parts = path.relative_to(ROOT / "moestro").with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def words() -> frozenset[str]:
    """Every name that a module of the package defines: functions, classes, attributes, fields."""
    pattern = re.compile(
        r"^\s*(?:async\s+)?(?:def|class)\s+(\w+)|^\s*(?:self\.)?(\w+)\s*(?::[^=\n]+)?=|^\s+(\w+):",
        re.MULTILINE,
    )
    found: set[str] = set()
    for path in modules().values():
        for match in pattern.finditer(path.read_text(encoding="utf-8")):
            found.update(group for group in match.groups() if group)
    return frozenset(found)


def names() -> list[str]:
    text = prose(ARCHITECTURE)
    return sorted(set(NAME.findall(text)) - set(PATH.findall(text)))


def exists(name: str) -> bool:
    """Whether `name` is a module, or an attribute path below one, or a name that is defined."""
    name = name.removeprefix("moestro.")
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        if (module := ".".join(parts[:cut])) in modules():
            return has(f"moestro.{module}", parts[cut:])
    if len(parts) == 1:
        return name in words()
    owners = [m for m, path in modules().items() if f"class {parts[0]}" in path.read_text("utf-8")]
    return any(has(f"moestro.{module}", parts) for module in owners)


def has(module: str, attributes: list[str]) -> bool:
    value: object = importlib.import_module(module)
    for attribute in attributes:
        fields = getattr(value, "__annotations__", {})
        value = getattr(value, attribute, None) or fields.get(attribute)
        if value is None:
            return False
    return True


@pytest.mark.parametrize("name", names())
def test_names_in_the_architecture_exist(name: str) -> None:
    # Words of other projects and of the shell, which stand in backticks too.
    foreign = {"torch", "transformers", "make", "assert", "utils", "Base"}
    assert name in foreign or exists(name)


def test_invented_names_do_not_exist() -> None:
    assert not exists("scheduler.nonsense")
    assert not exists("Nonsense.check")
    assert not exists("scheduler.plan.Nonsense")
    assert exists("scheduler.plan.StepPlan") or exists("scheduler.plan.DecodePlan")


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_paths_and_links_exist(document: str) -> None:
    text = prose((ROOT / document).read_text(encoding="utf-8"))
    paths = {p for p in PATH.findall(text) if not p.startswith(("v1/", "/"))}
    links = set(re.findall(r"\]\(([^)#:]+)\)", text))
    missing = [
        p
        for p in sorted(paths | links)
        if not ((ROOT / p).exists() or (ROOT / "moestro" / p).exists())
    ]
    assert missing == []


def test_the_table_of_flags_is_up_to_date() -> None:
    assert with_table(README) == README, "run python tools/flags_table.py"


def test_the_page_of_models_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tools.models_table"


def test_the_two_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = set(re.findall(r"^ *make ([a-z]+)", README, re.MULTILINE))
    assert {"serve", "test"} <= commands
    assert [c for c in commands if f"\n{c}:" not in makefile] == []
