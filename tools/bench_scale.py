"""Measures what a run costs at scale, on two cores, in some minutes.

    python tools/bench_scale.py end       summary, report and status at the end of a long run
    python tools/bench_scale.py buffer    merges and snapshots of a replay buffer of a million

``--json`` prints JSON. Ratios are more reliable than seconds.
"""

from __future__ import annotations

import argparse

from scale import buffer, end

from tba_hpc.report.tables import print_rows

BENCHES = {"end": end.measure, "buffer": buffer.measure}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bench", choices=BENCHES)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    print_rows(BENCHES[arguments.bench](), as_json=arguments.json)
