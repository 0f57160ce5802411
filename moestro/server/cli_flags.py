"""The command line's flags, built from the fields of `Config`.

Owns: how a setting is spelled as a flag, and what is refused. Does not own what a value means:
flags are handed on as text, and `config.load` judges them together with the other sources.
"""

from __future__ import annotations

import argparse
import typing
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from pydantic.fields import FieldInfo

from moestro.config import MULTIPLE, Config, nearest
from moestro.config_values import ENV_PREFIX
from moestro.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line with `message`. Raises ConfigError."""
        raise ConfigError(message)

    def parse_strictly(self, argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Values by name, only of flags that were given, and the words that are no flag's.

        Words may stand anywhere, and all after `--` are words. Raises ConfigError for an unknown
        flag.
        """
        end = argv.index("--") if "--" in argv else len(argv)
        values, words = self.parse_known_args([_dashes(word) for word in argv[:end]])
        for word in words:
            if word.startswith("-") and word != "-":
                flag = word.split("=", 1)[0]
                known = [f for f in self._option_string_actions if f.startswith("--")]
                raise ConfigError(f"unknown flag {flag}{nearest(flag, known)}", param=flag)
        return vars(values), [*words, *argv[end + 1 :]]


def _dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def flag_of(name: str) -> str:
    """The flag that sets the field `name`."""
    return "--" + name.replace("_", "-")


def config_parser(program: str, description: str) -> Parser:
    """A parser with one flag for each setting."""
    parser = Parser(
        prog=program,
        usage=f"{program} [MODEL] [flags]",
        description=description,
        epilog=f"Every flag can also be set by the environment, as {ENV_PREFIX}PORT sets --port, "
        "or in the file that --config names. The command line wins, then the environment.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for name, field in Config.model_fields.items():
        parser.add_argument(flag_of(name), **_argument(name, field))
    return parser


def config_flags(parser: Parser, argv: Sequence[str]) -> dict[str, Any]:
    """Settings (field -> text) from the words of a command line. Raises ConfigError."""
    values, words = parser.parse_strictly(argv)
    if len(words) > 1:
        raise ConfigError(f"one model at a time, not {' and '.join(words)}", param="model")
    if words:
        named = values.setdefault("model", words[0])
        if named != words[0]:
            raise ConfigError(f"two models: {words[0]} and --model {named}", param="model")
    return values


def _argument(name: str, field: FieldInfo) -> dict[str, Any]:
    text = (field.description or "").replace("%", "%%")
    if field.annotation is bool:
        return {
            "action": argparse.BooleanOptionalAction,
            "help": f"{text} ({'on' if field.default else 'off'})",
        }
    if field.default not in (None, "", ()):
        text = f"{text} ({shown_default(field)})"
    if name in MULTIPLE:
        return {"nargs": "+", "action": "extend", "metavar": "TEXT", "help": text}
    return {"metavar": metavar(name, field), "help": text}


def metavar(name: str, field: FieldInfo) -> str:
    """What stands for the value of a flag in the help: its choices, or its kind."""
    if typing.get_origin(field.annotation) is typing.Literal:
        return "|".join(cast("tuple[str, ...]", typing.get_args(field.annotation)))
    if name in {"gpu_memory", "host_memory", "max_request_body", "max_file_size", "files_quota"}:
        return "SIZE"
    if name == "chat_template_kwargs":
        return "JSON"
    kinds = {int: "N", float: "SECONDS", str: "TEXT"}
    kind = str(field.annotation)
    if name.endswith("_dir"):
        return "FOLDER"
    if "Path" in kind:
        return "FILE"
    return kinds.get(cast("type", field.annotation), "N" if "int" in kind else "TEXT")


def shown_default(field: FieldInfo) -> str:
    """A default the way a user would write it; empty when there is none."""
    default = field.default
    if default in (None, "", ()):
        return ""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, int) and default % 2**20 == 0 and default:
        return f"{default // 2**20}MiB"
    return f"{default:g}" if isinstance(default, float) else str(default)
