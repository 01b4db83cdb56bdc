"""The audit: clean over a run that was killed, stopped and resumed with other numbers of searchers.

Every kind of damage, seeded into copies of that run, is named.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGKILL, SIGTERM
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import tabular_run
from tabular_run import EVERY, STEPS, start
from typed import tba

from tba_hpc.config import FIRST_ELASTIC
from tba_hpc.core.types import Shard, make_uid
from tba_hpc.exchange.hdf5_shards import read_arrays, read_shard, write_arrays, write_shard
from tba_hpc.report.audit import Audit, audit, print_audit
from tba_hpc.report.audit.checks import _times_taken
from tba_hpc.report.audit.evidence import Evidence
from tba_hpc.run.checkpoints import latest_checkpoint
from tba_hpc.run.directory import RunDir, ShardKey
from tba_hpc.run.inventory import inventory, with_checksum
from tba_hpc.run.metrics import Record, read_metrics


@dataclass(frozen=True)
class Story:
    """One run: copies of it as it was killed, stopped and finished, and the audits taken under way."""

    killed: RunDir
    stopped: RunDir
    finished: RunDir
    under_way: list[Audit]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    """Three starts, each with another number of searchers."""
    run = RunDir.create(tabular_run.make_config(tmp_path_factory.mktemp("runs")))
    copies, verdicts = {}, []
    for name, searchers, sent in (("killed", 2, SIGKILL), ("stopped", 3, SIGTERM), ("finished", 1, None)):
        process = start(run, searchers=searchers, sent=sent, nth=EVERY + 4)
        while process.is_alive():
            verdicts.append(audit(run))
            process.join(0.2)
        tell_of_every_seal(run)
        copies[name] = RunDir(shutil.copytree(run.path, run.path.with_name(name), symlinks=True))
    return Story(**copies, under_way=verdicts)


def tell_of_every_seal(run: RunDir) -> None:
    """As if none had been killed between a seal and its record, which would make counts differ by chance."""
    evidence = Evidence.read(run)
    for (searcher, index), size in evidence.sizes.items():
        if size.trajectories and (searcher, index) not in evidence.seals:
            sealed = {"event": "sealed", "shard": index, **size._asdict()}
            with run.metrics_file("searcher", searcher).open("a") as file:
                file.write(json.dumps(sealed) + "\n")


@pytest.fixture
def copy(story: Story, tmp_path: Path) -> Callable[[str], RunDir]:
    """Makes a copy that may be damaged."""
    return lambda name: RunDir(shutil.copytree(getattr(story, name).path, tmp_path / name, symlinks=True))


def trainer(run: RunDir) -> list[Record]:
    """All records of the trainer's metrics."""
    return read_metrics(run.metrics_file("trainer"))


def write(path: Path, records: list[Record]) -> None:
    """Metrics anew."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


# --- Clean ---


def test_starts_without_a_trainer_are_told_from_those_with_one(
    copy: Callable[[str], RunDir], capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy("stopped")
    steps = audit(run).steps
    print_audit(audit(run))
    assert f"; {steps} steps in 2 attempts, " in capsys.readouterr().out
    while run.newest_attempt < 3:
        run.begin_attempt()
    print_audit(audit(run))
    assert f"; {steps} steps in 2 attempts whose trainer started (of 3), " in capsys.readouterr().out


def test_a_run_is_clean_however_it_ended(story: Story) -> None:
    killed, stopped, finished = (audit(run) for run in (story.killed, story.stopped, story.finished))
    assert killed.problems == stopped.problems == finished.problems == ()
    assert [verdict.attempts for verdict in (killed, stopped, finished)] == [1, 2, 3]
    assert (killed.finished, stopped.finished, finished.finished) == (False, False, True)
    for verdict in (killed, stopped, finished):
        assert verdict.trajectories == verdict.merged + verdict.pending > 0
        assert verdict.lost == verdict.doubled == 0

    # Killed in step 12, it goes on at the checkpoint of step 8; stopped twelve steps later, at that step.
    assert [verdict.steps for verdict in (killed, stopped, finished)] == [EVERY + 3, 2 * EVERY + 4, STEPS]
    assert finished.resumes == (3, 0) and finished.redone == 3


def test_a_run_under_way_is_clean(story: Story) -> None:
    """Files come and go while they are read."""
    assert [verdict.problems for verdict in story.under_way if not verdict.clean] == []
    assert len(story.under_way) > 5


def test_the_command_exits_with_the_verdict(story: Story, copy: Callable[[str], RunDir]) -> None:
    done = tba("audit", story.finished.path)
    assert done.returncode == 0 and ", 0 lost, 0 doubled; " in done.stdout, done

    run = copy("stopped")
    gone = delete_a_waiting_shard(run)
    done = tba("audit", run.path, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["clean"], told["lost"]) == (1, False, gone.lost)
    assert any(check["violations"] for check in told["checks"])


def test_a_request_is_contested_only_by_elastic_searchers() -> None:
    """A resume leaves out what waits of a request that an elastic searcher has answered, too; no other."""

    def times_taken(sealed: dict[ShardKey, tuple[int, ...]]) -> Counter[int]:
        waiting = [key for key in sealed if key != (FIRST_ELASTIC, 0)]
        return _times_taken(cast(Evidence, SimpleNamespace(saved_merges=[], waiting=waiting)), sealed)

    assert times_taken({(FIRST_ELASTIC, 0): (6, 12), (0, 0): (0, 6)}) == {0: 1, 6: 1, 12: 1}
    assert times_taken({(0, 0): (0, 6), (0, 1): (6,)}) == {0: 1, 6: 2}


# --- Damage ---


@dataclass(frozen=True)
class Damage:
    """What was done: words of the sentence that must name it, and the trajectories that it cost."""

    words: str
    lost: int = 0
    doubled: int = 0


def delete_a_waiting_shard(run: RunDir) -> Damage:
    """The last one of searcher 0, which no checkpoint holds."""
    path = waiting(run)[-1]
    shard = read_shard(path)
    path.unlink()
    return Damage(
        f"shard {shard.index} of searcher 0 is lost ({len(shard.trajectories)} acknowledged trajectories): "
        "no checkpoint holds it: its file is gone",
        lost=len(shard.trajectories),
    )


def corrupt_a_waiting_shard(run: RunDir) -> Damage:
    """One byte in the middle."""
    path = waiting(run)[0]
    shard, data = read_shard(path), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return Damage(
        f"shard {shard.index} of searcher 0 is lost ({len(shard.trajectories)} acknowledged trajectories): "
        "no checkpoint holds it: its file is corrupt: its checksum does not match",
        lost=len(shard.trajectories),
    )


def copy_a_shard_under_the_next_index(run: RunDir) -> Damage:
    """A whole file, but not that shard: nobody sealed it, and no reader will take it."""
    path = waiting(run)[-1]
    index = int(path.stem)
    shutil.copy(path, run.shard_file(0, index + 1))
    return Damage(f"the file of shard {index + 1} of searcher 0 is a copy of shard {index} of searcher 0")


def seal_a_shard_again(run: RunDir) -> Damage:
    """As a searcher would that was issued the same prompts again: other uids, the same request_ids."""
    path = waiting(run)[-1]
    shard = read_shard(path)
    index, trajectories = shard.index + 1, shard.trajectories
    record = trajectories.record.copy()
    record["uid"] = make_uid(0, index, 0) + np.arange(len(record), dtype=np.uint64)
    write_shard(run.shard_file(0, index), Shard(0, index, replace(trajectories, record=record)))
    words = f"sealed more than once: in shard {index - 1} of searcher 0, shard {index} of searcher 0"
    return Damage(words, doubled=len(record))


def delete_a_merge(run: RunDir) -> Damage:
    """One of several in its revision: the searcher has sealed it, and the checkpoint counts it."""
    merge = one_of_several(trainer(run))
    write(run.metrics_file("trainer"), [record for record in trainer(run) if record != merge])
    shard = f"shard {merge['shard']} of searcher {merge['searcher']}"
    return Damage(
        f"trainer.jsonl is damaged (a checkpoint counts {shard}, but no merge of it is on record): "
    )


def change_the_index_of_a_merge(run: RunDir) -> Damage:
    """As a flipped bit would: another shard seems to be merged twice, and this one lost."""
    merge = one_of_several(trainer(run))
    changed = {**merge, "shard": int(str(merge["shard"])) ^ 1}
    records = [changed if record == merge else record for record in trainer(run)]
    write(run.metrics_file("trainer"), records)
    shard = f"shard {merge['shard']} of searcher {merge['searcher']}"
    return Damage(
        f"trainer.jsonl is damaged (a checkpoint counts {shard}, but no merge of it is on record): "
    )


def delete_a_revision(run: RunDir) -> Damage:
    """What was merged at once; how often that happens depends on the machine."""
    records = trainer(run)
    *_, before, gone, last = [0, *sorted({r["revision"] for r in records if r.get("event") == "merged"})]
    write(run.metrics_file("trainer"), [record for record in records if record.get("revision") != gone])
    words = f"revision {last} follows revision {before}"
    return Damage(f"trainer.jsonl is damaged ({words}): it can no longer be proven")


def empty_the_trainers_records(run: RunDir) -> Damage:
    """All that the trainer said."""
    run.metrics_file("trainer").write_text("")
    return Damage("trainer.jsonl is damaged (a checkpoint is of step")


def cut_the_trainers_records(run: RunDir) -> Damage:
    """The second half of what the trainer said."""
    path = run.metrics_file("trainer")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    return Damage("trainer.jsonl is damaged (a checkpoint is of step")


def repeat_a_merge(run: RunDir) -> Damage:
    """As a trainer would that merged a shard twice."""
    records = trainer(run)
    place = max(i for i, record in enumerate(records) if record.get("event") == "merged")
    write(run.metrics_file("trainer"), [*records, records[place]])
    merge = records[place]
    shard = f"shard {merge['shard']} of searcher {merge['searcher']}"
    return Damage(f"{shard} was merged in revision {merge['revision']} and again in", doubled=count(merge))


def roll_a_cursor_back(run: RunDir) -> Damage:
    """A resume would merge a shard again."""
    path = newest(run) / "state.json"
    state = json.loads(path.read_text())
    state["cursors"]["0"] -= 1
    path.write_text(json.dumps(state, indent=2))
    complete_again(path.parent)
    return Damage(f"0: {state['cursors']['0']}")


def delete_a_file_of_the_learner(run: RunDir) -> Damage:
    """One that the audit knows from COMPLETE alone."""
    path = next(path for path in newest(run).iterdir() if path.suffix not in (".h5", ".json", ""))
    path.unlink()
    return Damage(f"{newest(run).name} is damaged: {path.name} is missing")


def mark_prompts_done(run: RunDir) -> Damage:
    """No resume would issue them again."""
    path = newest(run) / "prompts.h5"
    done = np.unpackbits(read_arrays(path)["done"])
    write_arrays(path, {"done": np.packbits(np.append(done, [1, 1]))})
    complete_again(path.parent)
    return Damage(f"requests {len(done)}, {len(done) + 1} marked done, but never merged: skipped")


def forget_a_prompt(run: RunDir) -> Damage:
    """A resume would issue it again."""
    path = newest(run) / "prompts.h5"
    done = np.unpackbits(read_arrays(path)["done"])
    request_id = np.flatnonzero(done)[0]
    done[request_id] = 0
    write_arrays(path, {"done": np.packbits(done)})
    complete_again(path.parent)
    return Damage(f"request {request_id} merged, but not marked done: issued again")


def drop_a_trajectory_from_the_buffer(run: RunDir) -> Damage:
    """As if it had been evicted without being counted."""
    path = newest(run) / "buffer.h5"
    arrays = read_arrays(path)
    kept = len(arrays["record"]) - 1
    write_arrays(path, {**arrays, "record": arrays["record"][:kept]})
    complete_again(path.parent)
    return Damage(f"the buffer holds {kept} trajectories, not {kept + 1}", lost=1)


def drop_steps(run: RunDir) -> Damage:
    """Records of two optimizer steps."""
    records = [record for record in trainer(run) if "event" in record or record["step"] not in (3, 4)]
    write(run.metrics_file("trainer"), records)
    return Damage("trainer.jsonl is damaged (step 5 follows step 2)")


def complete_again(folder: Path) -> None:
    """As if a file had been saved like this."""
    (folder / "COMPLETE").write_text(with_checksum(inventory(folder)))


def waiting(run: RunDir, searcher: int = 0) -> list[Path]:
    """Shards of a searcher beyond the newest checkpoint."""
    return [run.shard_file(*key) for key in Evidence.read(run).waiting if key[0] == searcher]


def newest(run: RunDir) -> Path:
    """Folder of the newest checkpoint."""
    folder = latest_checkpoint(run)
    assert folder is not None
    return folder


def one_of_several(records: list[Record]) -> Record:
    """The newest merge in a revision with others; an older one may have been taken back by the resume."""
    merges = [record for record in records if record.get("event") == "merged"]
    often = Counter(record["revision"] for record in merges)
    return next(record for record in reversed(merges) if often[record["revision"]] > 1)


def count(merge: Record) -> int:
    """Trajectories of a merge."""
    return int(str(merge["trajectories"]))


@pytest.mark.parametrize(
    "damage",
    [
        delete_a_waiting_shard,
        corrupt_a_waiting_shard,
        copy_a_shard_under_the_next_index,
        seal_a_shard_again,
        delete_a_merge,
        delete_a_revision,
        change_the_index_of_a_merge,
        empty_the_trainers_records,
        cut_the_trainers_records,
        repeat_a_merge,
        roll_a_cursor_back,
        mark_prompts_done,
        forget_a_prompt,
        drop_a_trajectory_from_the_buffer,
        drop_steps,
    ],
)
def test_damage_is_named(damage: Callable[[RunDir], Damage], copy: Callable[[str], RunDir]) -> None:
    run = copy("stopped")
    done = damage(run)
    verdict = audit(run)
    assert any(done.words in problem for problem in verdict.problems), (done, verdict.problems)
    assert (verdict.lost, verdict.doubled) == (done.lost, done.doubled), verdict.problems


def test_a_checkpoint_that_is_not_whole_is_named(copy: Callable[[str], RunDir]) -> None:
    """The shards since the one before are still on disk, so nothing is lost."""
    run = copy("finished")
    done, verdict = delete_a_file_of_the_learner(run), audit(run)
    assert any(done.words in problem for problem in verdict.problems), (done, verdict.problems)
    assert (verdict.lost, verdict.doubled) == (0, 0), verdict.problems


def test_a_finished_run_without_its_last_checkpoint_is_not_clean(copy: Callable[[str], RunDir]) -> None:
    run = copy("finished")
    shutil.rmtree(newest(run))
    problems = audit(run).problems
    words = f"the run is finished, but its newest checkpoint is of step {STEPS - EVERY}, not {STEPS}"
    assert words in problems, problems


def test_what_was_lost_before_a_resume_is_not_forgotten(copy: Callable[[str], RunDir]) -> None:
    """A corrupt shard is set aside by the resume, and the index of one that is gone is used again."""
    run = copy("stopped")
    corrupt, gone = corrupt_a_waiting_shard(run), waiting(run, 1)[-1]
    lost = corrupt.lost + len(read_shard(gone).trajectories)
    gone.unlink()
    start(run, searchers=3).join(240)
    verdict = audit(run)
    assert verdict.finished and (verdict.lost, verdict.doubled) == (lost, 0), verdict.problems
    aside, again = sorted(verdict.problems, key=lambda problem: "2 times" in problem)
    assert "should hold it, but no merge of it is on record: its file is corrupt" in aside
    assert f"shard {int(gone.stem)} of searcher 1 was sealed 2 times" in again


def test_a_resume_without_the_records_before_it_makes_no_loss_of_that(copy: Callable[[str], RunDir]) -> None:
    """What the checkpoint does not count either is lost all the same."""
    run = copy("stopped")
    corrupt = corrupt_a_waiting_shard(run)
    empty_the_trainers_records(run)
    start(run, searchers=3).join(240)
    verdict = audit(run)
    assert verdict.finished and (verdict.lost, verdict.doubled) == (corrupt.lost, 0), verdict.problems
    gap, lost = verdict.problems
    assert "trainer.jsonl is damaged (a resume from step" in gap and "follows step 0, revision 0" in gap
    assert lost.startswith("lost: ") and lost.endswith("that the newest checkpoint should hold")
    words = {check.name: check.proven for check in verdict.checks}
    assert words["no sealed shard is lost"] and not words["every shard merged once"]
