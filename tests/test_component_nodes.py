"""Sides of a het job: whatever Slurm chooses is in order; and what is read of Slurm for that."""

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tba_hpc.config import ConfigError, parse_config
from tba_hpc.launch.component_nodes import Cut, cut, separate_nodes
from tba_hpc.launch.plan import Plan, Site, plan
from tba_hpc.launch.sbatch import Job, batch_script


def _names(*numbers: int) -> list[str]:
    return [f"node{number:03d}" for number in numbers]


def _cut(nodes: int, needed: tuple[int, int], idle: Sequence[int] = ()) -> Cut | None:
    everything = frozenset(_names(*range(nodes)))
    return cut(
        sorted(everything),
        needed,
        (everything, everything),
        up=everything,
        idle=frozenset(_names(*idle)),
    )


# --- The rule ---


def test_alike_nodes_are_shared_out_by_what_each_needs() -> None:
    """2 + 6 of 100: a quarter and three quarters."""
    found = _cut(100, (2, 6))
    assert found == Cut(0, (tuple(_names(*range(25, 100))), tuple(_names(*range(25)))))


def test_the_cut_goes_where_both_may_start_at_once() -> None:
    """Nodes 70 and 71 and 80 to 85 are idle: the rest of the side is as large as can be."""
    idle = [70, 71, *range(80, 86)]
    either = _cut(100, (2, 6), idle)
    assert either is not None
    assert (either.first, either.leave[1][0], either.leave[0][-1]) == (1, "node084", "node083")


def _cut_two(order: Sequence[str], needed: tuple[int, int], trainers: Sequence[str]) -> Cut | None:
    """Nodes that trainers could have, all others searchers; all up, none idle."""
    fit = (frozenset(trainers), frozenset(order) - frozenset(trainers))
    return cut(order, needed, fit, up=frozenset(order), idle=frozenset())


def test_of_two_partitions_either_may_come_first() -> None:
    order = _names(1, 2, 3, 7, 8)
    assert _cut_two(order, (1, 2), order[:2]) == Cut(0, ((), ())), "nobody has to leave anything"
    assert _cut_two(order, (1, 2), order[3:]) == Cut(1, ((), ()))


def test_partitions_that_lie_among_each_other_are_cut() -> None:
    order = _names(*range(1, 10))
    trainers = _names(2, 4, 9)
    # With 1 3 5 6 7 8 | 9 two are left out, with 2 | 3 5 6 7 8 and 2 4 | 5 6 7 8 three.
    assert _cut_two(order, (1, 4), trainers) == Cut(1, (tuple(_names(2, 4)), ()))
    assert _cut_two(order, (1, 6), trainers) == Cut(1, (tuple(_names(2, 4)), ()))
    assert _cut_two(order, (2, 4), trainers) == Cut(0, (tuple(_names(9)), tuple(_names(1, 3))))
    assert _cut_two(order, (2, 6), trainers) is None


def test_nodes_that_are_down_are_not_counted_on() -> None:
    everything = frozenset(_names(*range(8)))
    found = cut(
        sorted(everything), (1, 1), (everything, everything), up=frozenset(_names(0, 1)), idle=frozenset()
    )
    assert found is not None and (found.leave[0][0], found.leave[1][-1]) == ("node001", "node000")
    assert cut(sorted(everything), (4, 4), (everything, everything), up=frozenset(), idle=frozenset())


# --- Simulated clusters ---


def _gap_fit(free: Sequence[int], nodes: int) -> list[int] | None:
    """Slurm's choice of free nodes: the smallest run of neighbours that holds them, else the largest."""
    runs: list[list[int]] = []
    for node in free:
        if runs and runs[-1][-1] == node - 1:
            runs[-1].append(node)
        else:
            runs.append([node])
    chosen: list[int] = []
    while len(chosen) < nodes and runs:
        enough = [run for run in runs if len(run) >= nodes - len(chosen)]
        run = min(enough, key=len) if enough else max(runs, key=len)
        runs.remove(run)
        chosen += run[: nodes - len(chosen)]
    return sorted(chosen) if len(chosen) == nodes else None


def _starts_right(free: Sequence[int], barred: tuple[set[int], set[int]], first: int) -> bool | None:
    """Whether components of 2 and 6 nodes lie in order as Slurm places them; None where they do not start."""
    placed: dict[int, list[int]] = {}
    for role in (first, 1 - first):
        taken = {node for nodes in placed.values() for node in nodes}
        left = [node for node in free if node not in barred[role] and node not in taken]
        found = _gap_fit(left, (2, 6)[role])
        if found is None:
            return None
        placed[role] = found
    return placed[first][-1] < placed[1 - first][0]


def test_the_first_start_is_right() -> None:
    """12 free of 100 nodes, 2 to train and 6 to search: without sides a third is right, with them all are."""
    chance, without, at_once, later = random.Random(12), [], [], []
    for _ in range(300):
        free = sorted(chance.sample(range(100), 12))
        without.append(_starts_right(free, (set(), set()), 0))
        found = _cut(100, (2, 6), idle=free)
        assert found is not None
        barred = tuple({int(name[4:]) for name in names} for names in found.leave)
        at_once.append(_starts_right(free, (barred[0], barred[1]), found.first))
        others = sorted(chance.sample(range(100), 12))  # the job waited, and others are free now
        later.append(_starts_right(others, (barred[0], barred[1]), found.first))
    assert 0.2 < sum(map(bool, without)) / 300 < 0.45, "the simulation is that of the review"
    assert all(at_once), "it starts at once, and right"
    assert False not in later, "whenever it starts, it starts right"
    assert sum(map(bool, later)) / 300 > 0.5, "and other nodes do as well"


# --- What Slurm says ---

SINFO = """\
a1|small|idle|64|500000|(null)|gpu:a100:4(S:0-1)|small
a2|small|drain|64|500000|nvlink|gpu:a100:4(S:0-1)|small
b1|large|mix|64|500000|nvlink,new|gpu:h100:4(S:0-1)|large*
b2|large|idle|64|500000|nvlink|gpu:h100:4|large*
b2|both|idle|64|500000|nvlink|gpu:h100:4|both
c1|large|idle~|64|500000|new|gpu:a100:2,gpu:h100:4|large*
c2|large|idle|32|250000|new|gpu:2|large*
c3|large|down*|64|500000|new|gpu:h100:4|large*
"""
SMALL_FIRST = ("searcher", "", "")
RESERVATION = "ReservationName=course StartTime=2026-01-01 Nodes=b[1-2],c1 NodeCnt=3"


def _expand(listed: str) -> list[str]:
    """``a[1-2],b3`` of one digit."""
    names = []
    for stem, first, last, number in re.findall(r"([a-z]+)(?:\[(\d)-(\d)\]|(\d))", listed):
        span = range(int(first), int(last) + 1) if first else [int(number)]
        names += [f"{stem}{each}" for each in span]
    return names


def _slurm(*command: str) -> str:
    """A cluster of eight nodes, whose order is that of the alphabet."""
    match command:
        case ("sinfo", *_):
            return SINFO
        case ("scontrol", "show", "hostlistsorted", listed):
            return ",".join(sorted(_expand(listed)))
        case ("scontrol", "show", "hostlist", listed):
            assert listed.split(",") == sorted(listed.split(",")), "sides are told in Slurm's order"
            return listed.replace("b1,b2", "b[1-2]").replace("c1,c2,c3", "c[1-3]")
        case ("scontrol", "show", "hostnames", listed):
            return "\n".join(_expand(listed))
        case (*_, "reservation", "course"):
            return RESERVATION
    raise AssertionError(command)


@pytest.fixture(autouse=True)
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tba_hpc.launch.component_nodes.ask", _slurm)


def _plan(nodes: int, **site: Any) -> tuple[Plan, Site]:
    values = {"cpus_per_node": 4, "gpus_per_node": 2} | site
    config = parse_config({"model": {"path": "none"}, "train": {"prompts_per_step": 2}})
    made = Site.model_validate(values)
    return plan(config, made, nodes), made


def _sides(nodes: int, **site: Any) -> tuple[str, str, str]:
    """Who comes first, and what trainers and searchers leave."""
    chosen = separate_nodes(*_plan(nodes, **site))
    return chosen.first, chosen.trainer.exclude, chosen.searcher.exclude


@pytest.mark.parametrize(
    ("nodes", "keys", "sides"),
    [
        (3, {}, ("trainer", "c[1-3]", "b[1-2]")),  # the default partition; c3 is down
        (3, {"partition": "large", "sbatch_options": ["--exclude=b1"]}, ("trainer", "b1,c[1-3]", "b1,b2")),
        (2, {"partition": "small"}, ("trainer", "a2", "a1")),  # a drained node comes back
        (2, {"trainer": {"partition": "small"}}, ("trainer", "", "")),
        (2, {"searcher": {"partition": "small"}}, ("searcher", "", "")),
        (2, {"searcher": {"partition": "small,both"}}, ("searcher", "b[1-2]", "")),
        (2, {"memory": "400G"}, ("trainer", "c1,c3", "b[1-2]")),
        (2, {"constraint": "new&ib|nvlink"}, ("trainer", "b2", "b1")),
        (2, {"gpu_request": "--gpus-per-node=h100:{gpus}"}, ("trainer", "c1,c3", "b[1-2]")),
        (2, {"gpu_request": "--gres=gpu:a100:{gpus}", "searcher": {"partition": "small"}}, SMALL_FIRST),
        (2, {"constraint": "nvlink", "partition": "large"}, ("trainer", "b2", "b1")),
        (2, {"sbatch_options": ["--reservation=course"]}, ("trainer", "c1", "b[1-2]")),
        (2, {"partition": "no-such"}, ("trainer", "", "")),  # Slurm's own words say more
        (6, {"partition": "large"}, ("trainer", "", "")),
        (2, {"sbatch_options": ["--nodelist=b1"]}, ("trainer", "", "")),  # the user's own choice
        (2, {"hetjob": False}, ("trainer", "", "")),
    ],
)
def test_component_nodes_follow_from_what_slurm_says(
    nodes: int, keys: dict[str, Any], sides: tuple[str, str, str]
) -> None:
    assert _sides(nodes, **keys) == sides


def test_component_nodes_that_cannot_be_are_refused_before_the_queue() -> None:
    """b2 lies between b1 and the other four."""
    keys = {"trainer": {"partition": "both"}, "searcher": {"partition": "large"}}
    with pytest.raises(ConfigError) as refused:
        separate_nodes(*_plan(5, **keys))
    assert str(refused.value) == (
        "1 trainer node of partition both and 4 searcher nodes of partition large cannot be chosen so that "
        "the names of one role all come before those of the other, as one MPI world over a het job needs:"
        " ask for fewer --nodes, or use one partition and --homogeneous"
    )


def test_the_script_says_the_sides() -> None:
    keys = {"searcher": {"partition": "small"}, "sbatch_options": ["--exclude=b1"], "partition": "large"}
    split, site = _plan(2, **keys)
    chosen = separate_nodes(split, site)
    assert chosen.first == "searcher"
    script = batch_script(Job(name="x", run=Path("/r")), chosen, site)
    component_0, component_1 = script.split("#SBATCH hetjob\n")
    assert "# Component 0, the searchers." in component_0 and "--partition=small" in component_0
    assert "--partition=large" in component_1
    assert "    export TBA_SEARCHERS_FIRST=1\n" in script
    assert script.index("--het-group=0 --nodes=1 --ntasks=$SEARCHERS") < script.index("--het-group=1")
    alike, site = _plan(3, sbatch_options=["--exclude=b1"])
    lines = batch_script(Job(name="x", run=Path("/r")), separate_nodes(alike, site), site).splitlines()
    mine = [line for line in lines if "--exclude=" in line]
    assert mine == [f"#SBATCH --exclude={nodes}" for nodes in ("b1", "b1,c[1-3]", "b1", "b1,b2")]
    assert "TBA_SEARCHERS_FIRST" not in "".join(lines)
