"""What sites have and a test machine lacks: modules, conda, containers; as commands that a job finds on PATH.

``module``, ``conda`` and ``activate`` fail under ``set -u``, as those of many sites do. A container is a root
of its own: a program in it sees a bare system, what was bound, and the image, a folder, at /opt/image.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

FUNCTIONS = {
    "module": 'echo "module $*$LMOD_SETTARG_CMD" >> "$STAND_INS/log"',
    "jutil": 'export PROJECT="$STAND_INS/project$JUTIL_NONE" SCRATCH="$STAND_INS/scratch"',
    "conda": '[ "$1" = info ] && echo "$STAND_INS/conda" || export CONDA_PREFIX="$2$CONDA_BACKUP_HOST"',
}
"""Shell functions that a login shell of some site defines."""

ACTIVATE = 'PATH="{venv}/bin:$PATH" PS1="(venv) $PS1_OF_NO_TERMINAL"\n'

PYTHON = '#!/bin/bash\necho {where} >> "$STAND_INS/log"\nexec {python} "$@"\n'
"""A Python that says where it was found."""

CONTAINER = """#!/bin/bash
# exec|run [OPTION…] IMAGE COMMAND…: as apptainer, singularity and podman-hpc have it
binds=()
shift
while [[ $1 == -* ]]; do
    case "$1" in
        --bind) binds+=("$2"); shift ;;
        --volume=*) binds+=("${1#*=}") ;;
    esac
    shift
done
[ -d "$1" ] || { echo "no image: $1"; exit 255; }
export IMAGE=$1 BINDS="${binds[*]}"
shift
exec unshare --mount --propagation private bash -c '
    mount -t tmpfs tmpfs /mnt || exit 255
    for path in /bin /sbin /lib /lib64; do [ -L "$path" ] && cp -P "$path" /mnt; done
    mkdir -m 1777 /mnt/tmp
    for pair in /usr /etc /proc /sys /dev $SEEN_INSIDE "$IMAGE:/opt/image" $BINDS; do
        from=${pair%%:*} to=/mnt${pair#*:}
        [ -d "$from" ] && ! [ -L "/mnt$from" ] || continue
        mkdir -p "$to" && mount --rbind "$from" "$to" || exit 255
    done
    exec chroot /mnt env PATH=/opt/image/bin:/usr/bin:/bin "$@"' bash "$@"
"""

SRUN = """#!/bin/bash
# srun with the options of pyxis, which come before the program as all our options do
options=() binds=()
while [[ $1 == -* ]]; do
    case "$1" in
        --container-image=*) image=${1#*=} ;;
        --container-mounts=*) IFS=, read -ra mounts <<< "${1#*=}"
            for mount in "${mounts[@]}"; do binds+=(--bind "$mount"); done ;;
        --no-container-*) ;;
        *) options+=("$1") ;;
    esac
    shift
done
[ -n "$image" ] && set -- singularity exec "${binds[@]}" "$image" "$@"
exec {srun} "${options[@]}" "$@"
"""


def make(folder: Path, program: Path, srun: str, seen_inside: list[Path]) -> dict[str, str]:
    """Put everything in ``folder``; returns the environment in which jobs find it.

    program: a script that only the image holds, as /opt/image/program.py. seen_inside: what else it sees.
    """
    home = folder / "home"
    for name in ("bin", "image/bin", "scratch", "conda/etc/profile.d", "home"):
        (folder / name).mkdir(parents=True)
    (folder / "image/program.py").write_text(program.read_text())
    (folder / "conda/etc/profile.d/conda.sh").write_text('echo "conda $CONDA_NONE" >> "$STAND_INS/log"\n')
    _command(folder / "image/bin/python", PYTHON.format(where="inside", python=sys.executable))
    for venv in (home / "tba-hpc/.venv", folder / "project/tba-hpc/.venv"):
        (venv / "bin").mkdir(parents=True)
        (venv / "bin/activate").write_text(ACTIVATE.format(venv=venv))
        _command(venv / "bin/python", PYTHON.format(where="venv", python=sys.executable))
    for name in ("apptainer", "singularity", "podman-hpc"):
        _command(folder / "bin" / name, CONTAINER)
    _command(folder / "bin/srun", SRUN.replace("{srun}", srun))
    functions = {f"BASH_FUNC_{name}%%": f"() {{  {body}; }}" for name, body in FUNCTIONS.items()}
    inside = " ".join(map(str, [folder, *seen_inside]))
    return functions | {
        "STAND_INS": str(folder),
        "SEEN_INSIDE": inside,
        "USER": "me",
        "HOME": str(home),
        "SCRATCH": str(folder / "scratch"),
    }


def log(environment: Mapping[str, str]) -> list[str]:
    """What the stand-ins noted, in order."""
    return Path(environment["STAND_INS"], "log").read_text().splitlines()


def _command(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
