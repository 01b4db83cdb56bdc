"""Words for numbers, in what people read."""

from __future__ import annotations


def count(number: int, thing: str) -> str:
    """``1 shard``, ``2 shards``, ``3,000 trajectories``."""
    plural = f"{thing[:-1]}ies" if thing.endswith("y") else f"{thing}s"
    return f"{number:,} {thing if number == 1 else plural}"
