"""Submits a run to Slurm as one job of trainer and searcher nodes, which requeues itself until it is done.

    python tools/submit.py --nodes 8
    python tools/submit.py --config configs/math_gsm8k.yaml --nodes 8 --site slurm/sites/a100x4-pmix.yaml

It does what ``tba submit`` does, from a clone. It needs no torch, and so runs on a login node.
"""

from __future__ import annotations

import sys

try:
    import typer

    from tba_hpc.cli import main, submit
except ModuleNotFoundError as error:
    print(f"submit: {error}: activate .venv, or use tba submit", file=sys.stderr)
    sys.exit(2)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(submit)

if __name__ == "__main__":
    main(app, "submit")
