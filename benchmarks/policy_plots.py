"""Tables and plots of the policy study, as Markdown and plain SVG. Owns: how they look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

Row = dict[str, Any]
NAMES = {
    "belady": "Belady (bound)",
    "plain_lru": "LRU, plain",
    "lru": "lru",
    "lfu": "lfu",
    "lru_frequency": "lru_frequency",
    "score": "score",
    "activation_aware": "activation_aware",
    "predictive": "predictive",
    "predictive_kept": "predictive, state kept",
}
COLOURS = {
    "belady": "#222222",
    "plain_lru": "#aaaaaa",
    "lru": "#4477aa",
    "lru_frequency": "#ccbb44",
    "predictive": "#ee6677",
    "predictive_kept": "#aa3377",
}
_BAR = ((25, 50), (4, 8, 16))  # capacities and streams of the bar that the policy has to keep
_WIDTH, _HEIGHT, _LEFT, _TOP = 210, 180, 46, 34
_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)


def _pick(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def table(rows: Sequence[Row]) -> str:
    """The bar of the issue: the share of Belady's margin that `predictive` wins."""
    head = "| traffic | path | streams | slots | LRU | lru | lru_frequency | predictive | kept |"
    head += " Belady | share over LRU | over lru |\n" + "| --- " * 12 + "|\n"
    lines = []
    for row in rows:
        if row["policy"] != "predictive":
            continue
        if row["capacity"] not in _BAR[0] or row["streams"] not in _BAR[1]:
            continue
        keys = ("traffic", "path", "streams", "capacity")
        here = {r["policy"]: r for r in _pick(rows, **{key: row[key] for key in keys})}
        names = ("plain_lru", "lru", "lru_frequency", "predictive", "predictive_kept", "belady")
        rates = [f"{here[name]['warm']:.1%}" if name in here else "" for name in names]
        shares = [_percent(row[f"share_over_{base}"]) for base in ("plain_lru", "lru")]
        cells = [row["traffic"], row["path"], row["streams"], f"{row['capacity']} %"]
        lines.append("| " + " | ".join(map(str, [*cells, *rates, *shares])) + " |")
    return head + "\n".join(lines) + "\n"


def document(rows: Sequence[Row]) -> str:
    """All hit rates: cold / warm, and exposed milliseconds a step."""
    out = [
        "# Hit rates of the policy study\n",
        "Written by `python -m benchmarks.policy_study --write docs/policies`; what was measured",
        "is in [policies.md](../policies.md). Each cell: hits in % of all passes, from empty slots",
        "/ of their second half / milliseconds exposed a step in the second half.\n",
    ]
    groups = dict.fromkeys((r["traffic"], r["synthetic"], r["path"], r["streams"]) for r in rows)
    for traffic, synthetic, path, streams in groups:
        some = _pick(rows, traffic=traffic, path=path, streams=streams)
        sizes = list(dict.fromkeys(row["capacity"] for row in some))
        kind = "synthetic" if synthetic else "recorded"
        out.append(f"## {traffic} ({kind}), {path}, streams: {streams}\n")
        out.append("| policy | " + " | ".join(f"{size} %" for size in sizes) + " |")
        out.append("| --- " * (len(sizes) + 1) + "|")
        for name in dict.fromkeys(row["policy"] for row in some):
            cells = [
                f"{row['cold']:.1%} / {row['warm']:.1%} / {row['exposed_ms']:.1f}".replace("%", "")
                for row in _pick(some, policy=name)
            ]
            out.append(f"| {NAMES[name]} | " + " | ".join(cells) + " |")
        out.append("")
    return "\n".join(out)


def plot(rows: Sequence[Row], traffic: str) -> str:
    """Hit rate over capacity, one panel for each number of streams; CPU above, GPU below."""
    some = _pick(rows, traffic=traffic)
    streams = list(dict.fromkeys(row["streams"] for row in some))
    paths = list(dict.fromkeys(row["path"] for row in some))
    width = _LEFT + len(streams) * (_WIDTH + 20)
    height = _TOP + len(paths) * (_HEIGHT + 44) + 20
    kind = "synthetic" if some[0]["synthetic"] else "recorded"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(_LEFT, 16, f"{traffic} ({kind}): hits of warm decode passes over slots", size=13),
    ]
    for line, path in enumerate(paths):
        for column, count in enumerate(streams):
            x, y = _LEFT + column * (_WIDTH + 20), _TOP + 14 + line * (_HEIGHT + 44)
            panel = _pick(some, path=path, streams=count)
            parts += _panel(panel, x, y, f"{path}, {count} stream{'s' * (count > 1)}")
    shown = [name for name in COLOURS if _pick(some, policy=name)]
    for place, name in enumerate(shown):
        x, y = _LEFT + place * 150, height - 8
        parts.append(f'<path d="M{x} {y - 4}h20" stroke="{COLOURS[name]}" stroke-width="2"/>')
        parts.append(_text(x + 25, y, NAMES[name]))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(rows: Sequence[Row], x: int, y: int, title: str) -> list[str]:
    def at(capacity: float, rate: float) -> str:
        return f"{x + capacity / 100 * _WIDTH:.1f} {y + (1 - rate) * _HEIGHT:.1f}"

    parts = [_text(x, y - 4, title)]
    for tick in _TICKS:
        parts.append(f'<path d="M{at(0, tick)}H{x + _WIDTH}" stroke="#dddddd"/>')
        parts.append(_text(x - 4, int(y + (1 - tick) * _HEIGHT) + 4, f"{tick:.0%}", anchor="end"))
        parts.append(
            _text(int(x + tick * _WIDTH), y + _HEIGHT + 14, f"{tick:.0%}", anchor="middle")
        )
    for name, colour in COLOURS.items():
        points = [at(row["capacity"], row["warm"]) for row in _pick(rows, policy=name)]
        if points:
            dash = ' stroke-dasharray="5 3"' if name == "belady" else ""
            line = "M" + "L".join(points)
            parts.append(f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
    return parts


def _text(x: int, y: int, text: str, *, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
