"""What a node sees: folders of its own, and a checkout read-only, wherever on this machine that lies."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

import pytest
from slurm_testbed import view
from slurm_testbed.cluster import missing
from slurm_testbed.hosts import Hosts

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(missing() is not None, reason=f"no Slurm cluster for tests: {missing()}"),
]


@pytest.fixture(params=["/tmp", "/var/tmp", "/dev/shm", "/root", "/opt"])
def home(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that its owner alone may enter, with a checkout, and a folder for runs of anybody."""
    home = Path(tempfile.mkdtemp(prefix="Jörg's ", dir=request.param))
    for name, mode in {"tba hpc": 0o755, "runs": 0o777, "secret": 0o755}.items():
        (home / name).mkdir()
        (home / name).chmod(mode)
    (home / "tba hpc/code").write_text("print()\n")
    (home / "tba hpc/code").chmod(0o644)  # the umask may be 077, as in a run
    yield home
    shutil.rmtree(home)


def test_a_user_of_a_node_reads_the_checkout_and_writes_runs(home: Path) -> None:
    checkout, runs = home / "tba hpc", home / "runs"
    as_root = view.script([*Hosts.private, *view.closed([checkout, runs])], [runs], [checkout])
    # The rest is two commands of the node: root's, then a user's.
    as_root += f"touch {quote(str(checkout))}/written 2> /dev/null && echo not read-only\n"
    words = [str(home), str(checkout / "code"), str(runs / "result")]
    as_user = ["sh", "-c", 'ls "$0" && cat "$1" && echo done > "$2"', *words]
    become = 'exec setpriv --reuid=nobody --regid=nogroup --clear-groups "$@"'
    node = ["unshare", "--mount", "sh", "-c", as_root + become, "sh", *as_user]
    done = subprocess.run(node, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("runs\ntba hpc\nprint()\n", "")
    assert (runs / "result").read_text() == "done\n"
