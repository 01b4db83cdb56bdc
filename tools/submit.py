"""Submits a run to Slurm: trainer and searcher nodes in one job, which goes on by itself until it is done.

    python tools/submit.py --nodes 8
    python tools/submit.py --config configs/math_gsm8k.yaml --nodes 8 --site slurm/sites/a100x4-pmix.yaml

It is ``tba submit``, for people who work in a clone. Needs no torch: made for a login node.
"""

from __future__ import annotations

import typer

from tba_hpc.cli import main, submit

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(submit)

if __name__ == "__main__":
    main(app, "submit")
