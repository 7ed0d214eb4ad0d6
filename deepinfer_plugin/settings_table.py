"""The README's table of DEEPINFER_* variables. ``python -m deepinfer_plugin.settings_table README.md`` renews it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from deepinfer_plugin.errors import InputError
from deepinfer_plugin.variables import VARIABLES, Variable

BEGIN, END = "<!-- settings: generated -->", "<!-- settings: end -->"


def table() -> str:
    """One Markdown row per variable, in the order of the table of variables; a row says if it is not built."""
    rows = ["| variable | values | default | feature | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, VARIABLES)])


def _row(variable: Variable[Any]) -> str:
    words = variable.kind.words
    values = ", ".join(f"`{word}`" for word in words) if words else variable.kind.rule
    default = f"`{variable.default}`" if variable.default else "unset"
    meaning = variable.meaning + ("; **not built**, another value is refused" if variable.not_built else "")
    return f"| `{variable.name}` | {values} | {default} | {variable.feature} | {meaning} |"


def renewed(text: str) -> str:
    """``text`` with the table between its two marks made anew.

    Raises:
        InputError: the marks are not there, once each.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise InputError(f"settings_table: the text has not one {BEGIN} and one {END}; put them around the table")
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def main(path: Path) -> None:
    """Renew the table in a file."""
    path.write_text(renewed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
