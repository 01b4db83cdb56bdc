"""``tba samples``: what the model of a run has said, and what became of it.

Shards are never changed once they are sealed, so running and crashed runs are read like finished ones.
"""

from __future__ import annotations

from tba_hpc.report.samples.select import Query, Selection, SortBy, select
from tba_hpc.report.samples.show import print_samples, write_page
from tba_hpc.report.samples.texts import run_tokenizer

__all__ = ["Query", "Selection", "SortBy", "print_samples", "run_tokenizer", "select", "write_page"]
