"""What a run costs at scale: a bench a module, each with ``measure``; ``tools/bench_scale.py`` runs them."""

Row = dict[str, object]
"""A line of the table."""


def row(what: str, now: float | str, unit: str, goal: str) -> Row:
    """What was measured, the figure, its unit, and what is to be reached."""
    return {"what": what, "now": now if isinstance(now, str) else round(now, 3), "unit": unit, "goal": goal}
