"""How ``scontrol --oneliner`` prints a record."""

from __future__ import annotations

import re


def fields(line: str) -> dict[str, str]:
    """The fields of ``Key=Value Key=Value …``; a value ends at the first blank."""
    return dict(re.findall(r"(\S+?)=(\S*)", line))
