# Sourced by a batch script of one node that searches for a run for a while, such as slurm/tba_search.sbatch: as many
# searchers as the job has tasks; asked to stop they leave, and the job goes back to the queue unless the run is
# finished. The run's own job knows nothing of it.
# Before: RUN, REQUEUE, SAVE_SECONDS, and ranks NUMBER, which starts so many searchers as one step: without MPI, since
# each has a place of its own, and its death is its own.

source "$(dirname "${BASH_SOURCE[0]}")/job_supervisor.sh"
unset TBA_ATTEMPT    # its ranks are others

event() { :; }       # these are the run's own

search_for_a_while() {
    local code searchers=${SLURM_NTASKS:-${SLURM_NTASKS_PER_NODE:-1}}
    [ -r "$RUN/config.yaml" ] || { say "$(hostname) does not see $RUN: put it on a file system that all nodes share"; exit 2; }
    if finished; then say "the run is finished: there is nothing to search for"; exit 0; fi
    [ "$STOP" = 1 ] && back_to_the_queue
    say "searching for $RUN on $(hostname); searchers: $searchers"
    place_caches
    ranks "$searchers" &
    STEP=$!
    [ "$STOP" = 1 ] && pass_on
    await "$STEP"
    code=$?
    kill $GUARD 2>/dev/null
    STEP=''
    if finished; then say "the run is finished"; exit 0; fi
    # Preempted by a plain TERM, searchers leave in peace, too, before this shell has heard of anything.
    [ "$STOP" = 1 ] || [ "$code" = 0 ] && back_to_the_queue
    [ "$code" = 3 ] && { say "no place is free: this job is not needed"; exit 0; }
    exit "$code"
}

back_to_the_queue() {
    refuse_end
    [ "$REQUEUE" = no ] && { say "stopped, and this site does not requeue"; exit 0; }
    queue_again
    exit 0
}
