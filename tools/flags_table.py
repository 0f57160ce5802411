"""Writes the README's table of flags from the fields of `Config`.

Run `python tools/flags_table.py` after a setting changed; a test compares the two.
"""

from __future__ import annotations

from pathlib import Path

from moestro.config import Config
from moestro.server.cli_flags import flag_of, metavar, shown_default

BEGIN, END = "<!-- flags: made by tools/flags_table.py -->", "<!-- end of flags -->"
README = Path(__file__).parents[1] / "README.md"


def table() -> str:
    """The table in Markdown, one row for each setting."""
    rows = ["| Flag | Value | Default | What it does |", "| --- | --- | --- | --- |"]
    for name, field in Config.model_fields.items():
        flag = flag_of(name)
        if field.annotation is bool:
            flag, value = f"{flag}, --no-{flag[2:]}", ""
        else:
            value = f"`{metavar(name, field)}`".replace("|", "\\|")
        default = shown_default(field)
        description = (field.description or "").replace("|", "\\|")
        rows.append(f"| `{flag}` | {value} | {default and f'`{default}`'} | {description} |")
    return "\n".join(rows)


def with_table(readme: str) -> str:
    """`readme` with the text between the two marks replaced. Raises ValueError without marks."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"{README} lacks the marks {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
