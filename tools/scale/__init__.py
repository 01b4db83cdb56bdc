"""Measures the cost of a run at scale: one bench per module, run by ``tools/bench_scale.py``."""

from tba_hpc.report.tables import Cell

Row = dict[str, Cell]
"""A row of the table."""


def row(what: str, now: float, unit: str, goal: str) -> Row:
    """Return a row: what was measured, the figure, its unit, and the goal."""
    return {"what": what, "now": round(now, 3), "unit": unit, "goal": goal}
