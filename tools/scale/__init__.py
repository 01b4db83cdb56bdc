"""What a run costs at scale: a bench a module, each with ``measure``; ``tools/bench_scale.py`` runs them."""

from tba_hpc.report.tables import Cell

Row = dict[str, Cell]
"""A line of the table."""


def row(what: str, now: float, unit: str, goal: str) -> Row:
    """What was measured, the figure, its unit, and what is to be reached."""
    return {"what": what, "now": round(now, 3), "unit": unit, "goal": goal}
