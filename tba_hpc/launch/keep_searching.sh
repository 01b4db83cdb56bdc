#!/bin/bash
# keep_searching.sh TIMES PROGRAM…: an elastic searcher, started again if it crashes while its neighbours go on,
# TIMES in a row. Slurm signals all processes of a step, the searcher too: one that was asked to go is not started again.

times=$1 tries=0 asked=0
shift
trap 'asked=1' USR1 TERM INT
while [ $asked = 0 ]; do
    began=$SECONDS
    "$@" &
    while kill -0 $! 2>/dev/null; do wait $!; done    # a signal interrupts `wait`
    wait $!
    code=$?
    case $code in 0 | 2 | 3) exit "$code" ;; esac     # it left; what only the user can mend; no place
    [ $asked = 1 ] && break
    [ $((SECONDS - began)) -ge "${LONG_SECONDS:-300}" ] && tries=0
    tries=$((tries + 1))
    [ $tries -gt "$times" ] && exit "$code"
    echo "[$(date '+%F %T') job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0}] searcher $SLURM_PROCID of $SLURM_NTASKS on" \
        "$SLURMD_NODENAME ended with status $code (failure $tries in a row): starting it again"
    sleep 2
done
