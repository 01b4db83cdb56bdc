#!/bin/sh
# Checks, before anything is downloaded, whether this machine can run what is to be installed. Prints a sentence for
# each thing that it lacks.
#     preflight.sh cpu|gpu ENVIRONMENT [PYTHON]     prints the interpreter to install with
#     preflight.sh python [PYTHON]                  checks only the interpreter
# Without PYTHON it takes the newest suitable interpreter on PATH. Suitable are versions for which the locks have
# wheels, if they run (a version manager's shim may not) and can make an environment. This is POSIX shell, because
# there may be no Python yet.
set -f

EXAMINE='
import platform, sys
version = "%d.%d.%d" % sys.version_info[:3]
if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit("is Python " + version)
if platform.python_implementation() != "CPython" or "t" in sys.abiflags:
    sys.exit("is not the usual CPython")
try:
    __import__(sys.argv[1])
except ImportError:
    sys.exit("has no %s of Python %d.%d" % ((sys.argv[1],) + sys.version_info[:2]))
print(version.replace(".", " ") + " " + sys.executable)
'

lack() { echo "$1" >&2; lacking=yes; }

# Arguments: NAME MODULE. Prints "3 minor patch executable", or a dash and what is wrong with the interpreter.
examine() {
    answer=$("$1" -c "$EXAMINE" "$2" 2>&1) && echo "$answer" && return
    case $answer in
        "is Python"* | "is not"* | "has no"*) echo "- $1 $answer" ;;
        *) echo "- $1 does not run" ;;
    esac
}

on_path() (
    IFS=:
    for folder in $PATH; do
        for name in python3 python3.11 python3.12 python3.13; do
            [ ! -x "$folder/$name" ] || examine "$folder/$name" ensurepip
        done
    done
)

no_python() {
    remedy='\1 has no ensurepip to make an environment with: apt-get install python\2-venv'
    no_venv=$(echo "$found" | sed -n "s/^- \(.*\) has no ensurepip of Python \(.*\)/$remedy/p" | head -n 1)
    wrong=$(echo "$found" | sed -n 's/^- //p' | sort -u | paste -s -d ';' - | sed 's/;/; /g')
    if [ -n "$no_venv" ]; then
        lack "$no_venv"
    else
        lack "${asked:-No suitable interpreter is on PATH}${wrong:+ ($wrong)}: install Python 3.11, 3.12 or 3.13\
 (apt-get install python3 python3-venv, dnf install python3.12, uv python install 3.13), or set PYTHON=/path/to/python3.12"
    fi
}

# Arguments: PYTHON MODULE. Sets $python to a suitable interpreter, or says what is missing.
find_python() {
    asked=${1:+"PYTHON=$1 is not suitable"}
    found=$(if [ -n "$1" ]; then examine "$1" "$2"; else on_path; fi)
    python=$(echo "$found" | grep -v '^-' | sort -s -k 2,2nr -k 3,3nr | head -n 1 | cut -d ' ' -f 4-)
    [ -n "$python" ] || no_python
}

ask_system() {
    [ "$(uname -s)" = Linux ] || lack "This is $(uname -s), and the packages are for Linux: use a Linux machine"
    case $target-$(uname -m) in
        *-x86_64 | gpu-aarch64) ;;
        *) lack "The packages for TARGET=$target are not pinned for a processor of type $(uname -m): use one of x86_64\
 (TARGET=gpu takes aarch64, too)" ;;
    esac
    glibc=$(getconf GNU_LIBC_VERSION 2>/dev/null | sed -n 's/^glibc 2\.\([0-9]*\).*/\1/p')
    [ "${glibc:-0}" -ge 31 ] || lack "The packages need glibc 2.31 or newer, and this system has\
 ${glibc:+glibc 2.}${glibc:-musl or another C library}: use a container (docker build), or Debian 11, Ubuntu 20.04, RHEL 9"
}

ask_space() {
    place=$environment
    while [ ! -e "$place" ]; do place=$(dirname "$place"); done
    free=$(df -P -k "$place" 2>/dev/null | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "${free:-$1}" -ge "$1" ] || lack "Installing takes about $1 GB and $environment has $free GB left:\
 free some, or put it elsewhere with VENV=/path/with/space"
}

ask_libnuma() {
    "$1" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || lack "vLLM needs libnuma.so.1, which this\
 system lacks: apt-get install libnuma1, dnf install numactl-libs, or conda install -c conda-forge numactl;\
 without root: apt-get download libnuma1 && dpkg -x libnuma1_*.deb ~/libnuma, then\
 export LD_LIBRARY_PATH=~/libnuma/usr/lib/x86_64-linux-gnu"
}

ask_compiler() {
    command -v "${CC:-gcc}" >/dev/null || command -v clang >/dev/null || lack "A GPU's kernels are compiled as the\
 run starts, and there is no C compiler here: apt-get install gcc libc6-dev, dnf install gcc, or set CC=/path/to/gcc"
    [ -z "$python" ] || "$python" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null \
        || lack "A GPU's kernels are compiled against Python.h, which $python lacks: apt-get install python3-dev,\
 dnf install python3-devel, or an interpreter of uv or conda"
}

target=$1
environment=$2
case $target in
    python) find_python "$2" ensurepip ;;
    *)
        ask_system
        if [ -e "$environment/bin/pip" ]; then
            find_python "$environment/bin/python" pip
        else
            find_python "$3" ensurepip
            ask_space "$([ "$target" = cpu ] && echo 4 || echo 12)"
        fi
        case $target in
            cpu) any=${python:-$(command -v python3)} && ask_libnuma "$any" ;;
            gpu) ask_compiler ;;
        esac
        ;;
esac
[ -z "$lacking" ] || exit 1
echo "$python"
