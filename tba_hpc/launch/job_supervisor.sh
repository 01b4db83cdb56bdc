# Sourced by every batch script of this project: the environment of the ranks, and how a job brings its run to
# an end through preemption, time limits, crashes and lost nodes. The script that sources it says what is where:
#   RUN              the run directory, on a file system that all nodes share
#   TBA, RANK        commands (arrays): `tba`, and `tba` as a rank of MPI
#   TRAINER_NODES, TRAINERS, SEARCHERS_PER_NODE, SEARCHERS      who works where
#   REQUEUE, RELAUNCHES, SAVE_SECONDS                           what the site allows
#   STEP_MEMORY, CACHES_IN                                      optional: see below
#   ranks()          starts all ranks as one step, and waits for it
# Everything here runs on the first node, outside any container: scontrol and srun must be found there.

# --- Environment. Each line may be overridden by the site file or by your shell. ---

umask 077                                             # a run is its owner's business
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}            # compute nodes seldom reach the internet; waiting for it costs minutes
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
export HDF5_USE_FILE_LOCKING=${HDF5_USE_FILE_LOCKING:-FALSE}   # shards never change once visible; locks fail on some file systems
export OMPI_MCA_btl=${OMPI_MCA_btl:-^ofi}              # Open MPI's one-sided way over libfabric: unused, and its start sleeps 1 s

STEP_MEMORY=${STEP_MEMORY---mem=0}                     # so that a step waits for no other; empty: this site takes no --mem
export SLURM_EXPORT_ENV=ALL                           # after `sbatch --export=NONE`, srun would leave all of this behind
unset ${!SRUN_@} ${!SQUEUE_@} ${!SCANCEL_@}           # options and filters that came along from your shell

needs() {            # needs KEY NAME…: refuse what a site key fills in where it is not set
    local key=$1 name
    shift
    for name; do
        [ -n "${!name+set}" ] && continue
        refuse "$name is not set on $(here), but the site key $key holds it: set it under setup in the site file, or \
write out what it stands for"
    done
}

enter_venv() {       # enter_venv FOLDER: activate a virtual environment
    [ -r "$1/bin/activate" ] || refuse "the site key venv leads to $1, which is no virtual environment on $(here): \
put it on a file system that the nodes see"
    source "$1/bin/activate"
}

here() { echo "${SLURMD_NODENAME:-$(hostname)}"; }

place_caches() {     # what engines compile and keep, on the node itself: a home may be read-only there, and files go stale on NFS
    # Its name is the run's: a requeued job finds it again. /tmp is everybody's, and what lies there is run as code:
    # nobody can guess the name, and each rank sees that the folder is ours. HF_HOME is left alone: it has the models.
    local place=${CACHES_IN:-${TMPDIR:-/tmp}} name draft keeper
    [ -w "$place" ] || place=/tmp
    mkdir -p "$RUN/slurm"
    name=$(mktemp -u tba-XXXXXXXXXXXXXXXX)
    if [ ! -s "$RUN/slurm/caches" ]; then    # of several jobs that get here at once the first names it
        draft=$(mktemp "$RUN/slurm/caches.XXXXXXXX") && echo "$name" > "$draft" && ln "$draft" "$RUN/slurm/caches"
        rm -f "$draft"
    fi 2>/dev/null
    [ -s "$RUN/slurm/caches" ] && read -r name < "$RUN/slurm/caches"
    export TBA_CACHES=$place/$name
    for keeper in VLLM_CACHE_ROOT TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR FLASHINFER_WORKSPACE_BASE TVM_FFI_CACHE_DIR \
        TORCH_EXTENSIONS_DIR CUDA_CACHE_PATH HF_MODULES_CACHE MPLCONFIGDIR
    do
        export "$keeper=${!keeper:-$TBA_CACHES/$keeper}"
    done
}

say() { echo "[$(date '+%F %T') job $SLURM_JOB_ID restart ${SLURM_RESTART_COUNT:-0}] $*"; }

event() {            # event NAME ['"KEY": VALUE']: a line of the run's history; log_event in tba_hpc/run/events.py has them all
    [ -d "${RUN:-}" ] || return 0
    printf '{"time": %s, "event": "%s", "job": "%s", "restarts": %s%s}\n' "$(date +%s.%N)" "$1" \
        "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "${2:+, $2}" >> "$RUN/events.jsonl"
}

quoted() {           # quoted TEXT: as a string of JSON
    local text
    text=$(printf %s "$1" | tr '\000-\037' ' ')
    text=${text//\\/\\\\}
    printf '"%s"' "${text//\"/\\\"}"
}

# --- Being asked to stop ---
# Slurm sends USR1 to this shell (#SBATCH --signal=B:USR1@…), not to the ranks: it would kill the other commands
# below. The shell listens from here on, remembers, and passes it on; the ranks checkpoint at their next safe point
# and end, or end at once where they are still starting. The trainer also keeps an eye on the clock by itself: from
# TBA_JOB_END it counts back the time that its saves have taken.

STOP=0 STEP='' GUARD=''
trap 'asked_to_stop' USR1
trap ':' TERM        # Slurm is ending the job; stay to see the step off

asked_to_stop() {
    [ "$STOP" = 1 ] && return
    STOP=1
    event signal
    say "asked to stop: the ranks have $SAVE_SECONDS s for a checkpoint"
    pass_on
}

pass_on() {          # srun hands USR1 to every rank of every component
    [ -n "$STEP" ] && [ -z "$GUARD" ] || return 0
    insist "$STEP" >/dev/null 2>&1 &
    GUARD=$!
}

insist() {           # insist SRUN: it may lose a signal that comes while it is starting the ranks
    local end=$((SECONDS + SAVE_SECONDS))
    while [ $SECONDS -lt $end ]; do kill -USR1 "$1" && sleep 2 || return; done
    kill -KILL "$1"  # a rank that hangs must not cost the requeue: at the wall time Slurm ends the job for good
}

job_end() {          # when the time of this allocation is over, in unix seconds; fails where it has no limit
    local end
    end=$(TZ=UTC SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e | head -n 1)
    [ -n "$end" ] && TZ=UTC date +%s -d "$end" 2>/dev/null
}

await() {            # exit status of a child: a signal interrupts `wait`, not this
    while kill -0 "$1" 2>/dev/null; do wait "$1"; done
    wait "$1"
}

QUIET_SECONDS=30     # silence of all ranks after which Slurm is asked whether they are there: three signs of life left out
ASK_SECONDS=120      # shortest time between two such questions

watch_step() {       # watch_step SRUN: end an srun that outlives its step
    # In a het step under PMIx, srun has one thread per component, and in some versions of Slurm (22.05 among them)
    # both may wait for the same thread at the end: it then hangs, long after the last rank has ended. Ranks at work
    # touch their files in RUN/owners; only where no trainer does Slurm is asked. Searchers of other jobs live on.
    local mark=$RUN/slurm/heard since=$SECONDS asked=$((SECONDS - ASK_SECONDS)) seen=0 missed=0 steps
    touch "$mark"
    while sleep 5 && kill -0 "$1" 2>/dev/null; do
        if [ -n "$(find "$RUN/owners" -name 'trainer*' -newer "$mark" -print -quit 2>/dev/null)" ]; then
            touch "$mark"
            since=$SECONDS seen=1 missed=0
        fi
        [ $((SECONDS - since)) -ge $QUIET_SECONDS ] && [ $((SECONDS - asked)) -ge $ASK_SECONDS ] || continue
        asked=$SECONDS
        steps=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i 2>/dev/null) || continue
        if grep -qE '\.[0-9]+$' <<< "$steps"; then seen=1 missed=0; continue; fi
        missed=$((missed + 1))
        [ $((missed + seen)) -ge 2 ] || continue     # one not seen yet may still wait for its nodes
        event hung
        say "srun hangs although its step has ended: ending it"
        kill -KILL "$1"
        return
    done
}

# --- One run, one job ---

# Of an array it is this job alone: the id of the last one to start is that of them all, too.
ME=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
ME=${ME:-$SLURM_JOB_ID}

state_of() { squeue --noheader --jobs="$1" --format='%T %k' 2>/dev/null | head -n 1; }

ending() {           # whether Slurm is ending this job: what fails then is no fault of ranks or nodes
    local state
    state=$(state_of "$ME")
    state=${state%% *}
    [ "${state:-RUNNING}" != RUNNING ]       # no answer is no end
}

ANSWER_SECONDS=300   # longest wait for Slurm's controller, which may be on its way to another machine
ANSWER_PAUSE=5

refuse_end() {       # leave where Slurm ends this job already: one that was cancelled would run again if it queued itself
    local end=$((SECONDS + ANSWER_SECONDS)) state
    until state=$(state_of "$ME"); [ -n "$state" ]; do
        [ $SECONDS -lt $end ] || { say "Slurm does not answer: submit the same run again to go on"; exit 1; }
        sleep $ANSWER_PAUSE
    done
    [ "${state%% *}" = RUNNING ] && return
    say "Slurm is ending this job (${state%% *}); nothing more to do here"
    exit 0
}

queue_again() {      # put this job back into the queue
    local end=$((SECONDS + ANSWER_SECONDS)) said
    say "back to the queue"
    trap '' TERM     # Slurm ends this shell now; only then can the job start again
    until said=$(scontrol requeue "$ME" 2>&1); do
        if [ $SECONDS -ge $end ] || [[ ! ${said,,} =~ contact|timed\ out|connect|communicat ]]; then
            say "Slurm refused to requeue: submit the same run again to go on ($said)"
            exit 1
        fi
        sleep $ANSWER_PAUSE
    done
}

claim_run() {        # two jobs on one run directory would train it twice
    local owner=''
    mkdir -p "$RUN/slurm" || exit 2
    scontrol update "JobId=$SLURM_JOB_ID" "Comment=$RUN"
    [ -f "$RUN/slurm/job" ] && read -r owner < "$RUN/slurm/job"
    if [ -n "$owner" ] && [ "$owner" != "$SLURM_JOB_ID" ] && [ "$(state_of "$owner")" = "RUNNING $RUN" ]; then
        say "job $owner is at work on $RUN: let it finish, or cancel it with: scancel $owner"
        exit 2
    fi
    "${TBA[@]}" claim "$RUN" || exit         # of two that got here at once, or where `tba run` is at work
    echo "$SLURM_JOB_ID" > "$RUN/slurm/job.tmp" && mv "$RUN/slurm/job.tmp" "$RUN/slurm/job"
}

drop_orphans() {
    # When the first node is lost, Slurm starts component 0 again elsewhere and leaves the others as they are, at
    # work for a leader that is gone. Their nodes are still ours: only the old step must go.
    local group other
    for ((group = 1; group < ${SLURM_HET_SIZE:-1}; group++)); do
        other=SLURM_JOB_ID_HET_GROUP_$group
        cancel_steps "${!other}"
    done
}

cancel_steps() {
    local end=$((SECONDS + 60)) steps seen=''
    while steps=$(squeue --noheader --steps --jobs="$1" --format=%i | grep -E '\.[0-9]+$') && [ $SECONDS -lt $end ]; do
        [ "$steps" = "$seen" ] || { event orphan; say "cancelling steps left from before the requeue:" $steps; }
        seen=$steps
        scancel $steps
        sleep 1
    done
}

# --- Which nodes answer ---

all_nodes() {        # "node1,node2,…": those of all components
    scontrol show hostnames "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N | paste -sd,)" | paste -sd,
}

allocated() {        # allocated [GROUP]: host names, as Slurm has them now
    local job=$SLURM_JOB_ID other=SLURM_JOB_ID_HET_GROUP_${1:-}
    [ -n "${1:-}" ] && job=${!other}
    scontrol show hostnames "$(squeue --noheader --jobs="$job" --format='%i %N' | awk -v g="+${1:-}" \
        'NF == 2 && (g == "+" || index($1, g)) {print $2}')"
}

PROBE_SECONDS=60     # longest wait for the nodes to start a process

probe() {            # probe "GROUP" HOST…: those that start a process, in order; with a "!" where RUN is not seen
    # One step over all of them; a node that is lost leaves the words of the others.
    local host group=() answers
    [ -n "$1" ] && group=("--het-group=$1")
    shift
    [ $# -gt 0 ] || return 0
    answers=$(timeout -k 5 "$PROBE_SECONDS" srun --overlap $STEP_MEMORY --mpi=none "${group[@]}" \
        --nodes=$# --ntasks=$# --ntasks-per-node=1 --nodelist="$(joined "$@")" \
        bash -c '[ -r "$0/config.yaml" ] || blind=!; echo "${blind:-}$SLURMD_NODENAME"' "$RUN" </dev/null 2>/dev/null)
    for host; do grep -xF -e "$host" -e "!$host" <<< "$answers"; done
}

left_out() {         # left_out HOST… -- HOST…: those of the first that are not among the second
    local first=()
    while [ "$1" != -- ]; do first+=("$1"); shift; done
    shift
    [ ${#first[@]} = 0 ] || printf '%s\n' "${first[@]}" | grep -vxF "$(printf '%s\n' "${@#!}")"
}

unreachable() {      # unreachable HOST…: nodes that did not answer, unless that is since Slurm ends the job
    local host
    [ $# = 0 ] || ending && return
    for host; do event unreachable "\"nodes\": \"$host\""; say "$host does not answer"; done
}

refuse() {           # refuse SENTENCE: end the job for good with what only the user can mend; another start will not
    event refused "\"sentence\": $(quoted "$1")"
    say "$1"
    exit 2
}

refuse_blind() {
    local host
    for host; do
        [ "${host#!}" = "$host" ] && continue
        refuse "${host#!} does not see $RUN: put run.root on a file system that all nodes share"
    done
}

WHY=''               # why these nodes will not do
ASKED_SIDES=''       # "GROUP NODES" lines: what each component must not get, so that the next nodes lie as they should

place_components() { # het form: every node is needed, since Slurm requeues the whole job when one is lost
    local first second all fit missing sorted look
    mapfile -t first < <(allocated 0)
    mapfile -t second < <(allocated 1)
    all=("${first[@]}" "${second[@]}")
    WHY="Slurm names no nodes of one component"
    [ ${#first[@]} -gt 0 ] && [ ${#second[@]} -gt 0 ] || return 1
    for look in 1 2; do                      # another place in the queue would cost more than a second look
        mapfile -t fit < <(probe 0 "${first[@]}" & probe 1 "${second[@]}"; wait)
        refuse_blind "${fit[@]}"
        mapfile -t missing < <(left_out "${all[@]}" -- "${fit[@]}")
        [ ${#missing[@]} = 0 ] || ending && break
        [ $look = 2 ] || say "no answer yet from ${missing[*]}: asking once more"
    done
    unreachable "${missing[@]}"
    WHY="no answer came from ${missing[*]}"
    [ ${#missing[@]} = 0 ] || return 1
    # A component 0 that was restarted alone may share a node with component 1; srun cannot start a step on that.
    WHY="its components share a node"
    [ -z "$(printf '%s\n' "${all[@]}" | sort | uniq -d)" ] || return 1
    mapfile -t sorted < <(scontrol show hostnames "$(scontrol show hostlistsorted "$(joined "${all[@]}")")")
    [ "${all[*]}" = "${sorted[*]}" ] && return
    # PMIx takes the nodes of a het step in Slurm's own order, srun in that of the components (22.05 to 26.05 at
    # least): where they differ, the first collective hangs. `tba submit` sees to it before; a job by hand cannot.
    WHY="its nodes are not in Slurm's own order, component 0 first: ${all[*]}"
    ASKED_SIDES=$("${TBA[@]}" sides "$SLURM_JOB_ID" 2>&1) || refuse "$WHY; $ASKED_SIDES"
    return 1
}

joined() { (IFS=,; echo "$*"); }

choose_sides() {     # once the job is pending again, for Slurm changes no other
    local group nodes
    while read -r group nodes; do
        [[ $group =~ ^[0-9]+$ ]] || continue
        scontrol update "JobId=$SLURM_JOB_ID+$group" "ExcNodeList=$nodes" 2>/dev/null \
            || say "component $group may come to lie on the same nodes again"
    done <<< "$ASKED_SIDES"
}

place_ranks() {      # homogeneous form: the first nodes train, and any number of others searches
    local hosts fit missing searching
    mapfile -t hosts < <(allocated)
    mapfile -t fit < <(probe '' "${hosts[@]}")
    refuse_blind "${fit[@]}"
    mapfile -t missing < <(left_out "${hosts[@]}" -- "${fit[@]}")
    unreachable "${missing[@]}"
    if [ "$SEARCHERS_PER_NODE" = 0 ]; then       # who searches comes by itself
        WHY="no answer came from ${missing[*]}"
        [ ${#missing[@]} = 0 ] || return 1
        NODES_LEFT=${#fit[@]}
        spread "$TRAINERS" "${fit[@]}" > "$RUN/slurm/hosts"
        return
    fi
    if [ "$NODES" = 1 ]; then
        searching=("${fit[@]}")
    else
        searching=("${fit[@]:$TRAINER_NODES}")
        SEARCHERS=$((${#searching[@]} * SEARCHERS_PER_NODE))
    fi
    WHY="no node is left to search"
    [ ${#searching[@]} -gt 0 ] || return 1
    NODES_LEFT=${#fit[@]}
    { spread "$TRAINERS" "${fit[@]:0:$TRAINER_NODES}"; spread "$SEARCHERS" "${searching[@]}"; } > "$RUN/slurm/hosts"
}

spread() {           # spread RANKS HOST…: the host of each rank, in blocks as even as can be
    local ranks=$1 rank hosts
    shift
    hosts=("$@")
    for ((rank = 0; rank < ranks; rank++)); do echo "${hosts[rank * $# / ranks]}"; done
}

# --- To the end ---

look_again() { ls "$1" >/dev/null 2>&1; }     # the leader may be on another node: a client of NFS keeps what it saw

finished() {         # whether nothing is left to do
    look_again "$RUN"
    [ -e "$RUN/finished" ]
}

refusal() {          # the sentence of the rank that first met something that only the user can mend, if any did
    local files
    mapfile -t files < <(ls -tr "$RUN"/logs/latest/refused-*.txt 2>/dev/null)
    [ ${#files[@]} -gt 0 ] && cat "${files[0]}"
}

unheard() {          # unheard CODE: whether the request to stop ended the ranks before they listened to it: USR1 some
    # of them, srun the others, with any status but that of `insist`. The leader says when all have come together.
    look_again "$RUN/logs/latest/"
    [ "$STOP" = 1 ] && [ "$1" != $((128 + $(kill -l KILL))) ] && ! refusal >/dev/null \
        && [ ! -e "$RUN/logs/latest/at-work" ]
}

progress() {         # progress SINCE: whether this job has sealed anything after that file: a shard or a checkpoint
    # Searchers that come and go (from 5000 on) seal whatever becomes of this job.
    [ -n "$(find "$RUN/shards" "$RUN/checkpoints" -path "$RUN/shards/searcher-[5-9][0-9][0-9][0-9]" -prune -o \
        \( -name '*.h5' -o -name COMPLETE \) -newer "$RUN/slurm/$1" -print -quit 2>/dev/null)" ]
}

at_the_end() {       # whether the wall time of this allocation is nearly over
    local end
    end=$(job_end) && [ $((end - $(date +%s))) -lt $((SAVE_SECONDS + 120)) ]
}

count_idle() {       # allocations in a row that sealed nothing, those left out that a preemption cut short: more will not help
    local idle=0
    if progress allocated; then rm -f "$RUN/slurm/idle"; return; fi
    [ "$STOP" = 1 ] && ! at_the_end && return
    [ -f "$RUN/slurm/idle" ] && read -r idle < "$RUN/slurm/idle"
    echo $((idle + 1)) > "$RUN/slurm/idle"
    [ "$idle" -lt "$RELAUNCHES" ] && return
    rm -f "$RUN/slurm/idle"
    refuse "$((idle + 1)) starts of this job in a row sealed nothing: give it more wall time (--time, site key time), or, \
where the nodes would not do, other nodes or the form without het job (--homogeneous)"
}

for_good() {         # whether `tba stop` has named this job: it ends where it would go back to the queue
    ls "$RUN/slurm" > /dev/null              # so that a client of NFS looks again
    [ "$(cat "$RUN/slurm/stop" 2>/dev/null)" = "$SLURM_JOB_ID" ] || return
    rm "$RUN/slurm/stop"
    say "stopped for good, as asked: submit the same run again to go on"
}

requeue() {
    refuse_end
    for_good && exit 0
    if [ "$REQUEUE" = no ]; then
        progress allocated || refuse "nothing was sealed (${WHY:-the job was asked to stop too soon}), and this site \
does not requeue: submit the same run again"
        say "stopped, and this site does not requeue: submit the same run again to go on"
        exit 0
    fi
    count_idle
    event requeue
    queue_again
    choose_sides
    exit 0
}

run_to_the_end() {   # run_to_the_end PLACE: start the ranks, again and again, until the run is finished
    local tries=0 code watcher sentence
    claim_run
    place_caches
    touch "$RUN/slurm/allocated"
    event allocated "\"nodes\": \"$(all_nodes)\""
    drop_orphans
    if finished; then say "the run is finished already: $RUN/summary.json"; exit 0; fi
    if for_good; then event stopped; exit 0; fi
    while [ "$STOP" = 0 ]; do
        "$1" || { ending || say "these nodes will not do: ${WHY:=nobody says why}"; break; }
        WHY=''
        "${TBA[@]}" prepare "$RUN" --set "launch.trainers=$TRAINERS" --set "launch.searchers=$SEARCHERS" || exit
        TBA_ATTEMPT=$(basename "$(readlink -f "$RUN/logs/latest")")   # other nodes may hold the link before
        export TBA_ATTEMPT
        TBA_JOB_END=$(job_end) && export TBA_JOB_END || unset TBA_JOB_END
        touch "$RUN/slurm/start"
        say "starting $TRAINERS trainer ranks and $SEARCHERS searchers; their logs: $RUN/logs/latest"
        ranks &
        STEP=$!
        [ "$STOP" = 1 ] && pass_on           # asked just now
        watch_step "$STEP" & watcher=$!
        await "$STEP"
        code=$?
        kill "$watcher" $GUARD 2>/dev/null
        STEP='' GUARD=''
        if finished; then event finished; say "the run is finished: $RUN/report.html"; exit 0; fi
        unheard "$code" && code=0
        if [ "$code" = 0 ]; then event stopped; break; fi
        sentence=$(refusal) && refuse "$sentence"
        ending && break
        event failed "\"code\": $code"
        progress start && tries=0
        tries=$((tries + 1))
        say "the ranks ended with status $code (failure $tries in a row): see $RUN/logs/latest"
        [ "$STOP" = 0 ] && [ "$tries" -gt "$RELAUNCHES" ] && { say "giving up"; exit "$code"; }
        sleep 2
    done
    requeue
}
