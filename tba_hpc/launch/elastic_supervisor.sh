# Sourced by a batch script of one node that searches for a run for a while, such as slurm/tba_search.sbatch: as many
# searchers as the job has tasks; asked to stop they leave, and the job goes back to the queue unless the run is
# finished. The run's own job knows nothing of it.
# Before: RUN, REQUEUE, RELAUNCHES, SAVE_SECONDS, and ranks NUMBER, which starts so many searchers as one step: without MPI, since
# each has a place of its own, and its death is its own: by SEARCHING each is started again by itself. What ends the whole step
# is mended here.

source "$(dirname "${BASH_SOURCE[0]}")/job_supervisor.sh"
unset TBA_ATTEMPT    # its ranks are others
SEARCHING=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/keep_searching.sh

event() { :; }       # these are the run's own

LONG_SECONDS=300     # searchers that were there for so long have not failed at once

search_for_a_while() {
    local code began tries=0 searchers=${SLURM_NTASKS:-${SLURM_NTASKS_PER_NODE:-1}}
    [ -r "$RUN/config.yaml" ] || { say "$(hostname) does not see $RUN: put it on a file system that all nodes share"; exit 2; }
    if finished; then say "the run is finished: there is nothing to search for"; exit 0; fi
    [ "$STOP" = 1 ] && back_to_the_queue
    place_caches
    while :; do
        say "searching for $RUN on $(hostname); searchers: $searchers"
        began=$SECONDS
        ranks "$searchers" &
        STEP=$!
        [ "$STOP" = 1 ] && pass_on
        await "$STEP"
        code=$?
        kill $GUARD 2>/dev/null
        STEP='' GUARD=''
        if finished; then say "the run is finished"; exit 0; fi
        # Preempted by a plain TERM, searchers leave in peace, too, before this shell has heard of anything.
        [ "$STOP" = 1 ] || [ "$code" = 0 ] && back_to_the_queue
        [ "$code" = 2 ] && exit 2        # what only the user can mend
        [ "$code" = 3 ] && { say "the run has as many elastic searchers as it takes: this job is not needed"; exit 0; }
        ending && back_to_the_queue
        [ $((SECONDS - began)) -ge $LONG_SECONDS ] && tries=0
        tries=$((tries + 1))
        say "the searchers ended with status $code (failure $tries in a row)"
        [ "$tries" -gt "${RELAUNCHES:-3}" ] && { say "giving up"; exit "$code"; }
        sleep 2
        [ "$STOP" = 1 ] && back_to_the_queue
    done
}

back_to_the_queue() {
    refuse_end
    [ "$REQUEUE" = no ] && { say "stopped, and this site does not requeue"; exit 0; }
    queue_again
    exit 0
}
