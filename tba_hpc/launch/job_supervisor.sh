# Sourced by every batch script of this project. It sets the environment of the ranks. On the first node,
# outside any container, it does what needs Slurm's commands: signals, nodes, steps, the queue. What comes
# next `tba supervise` (supervise.py) decides. The script that sources this library sets:
#   RUN              the run directory, on a file system that all nodes share
#   TBA, RANK        commands (arrays): `tba`, and `tba` as a rank of MPI
#   NODES, TRAINER_NODES, TRAINERS, SEARCHERS_PER_NODE, SEARCHERS      who works where; a het job needs TRAINERS, SEARCHERS
#   REQUEUE, RELAUNCHES, SAVE_SECONDS                           what the site allows
#   CHAINED                                                     1: it follows another job of a chain
#   STEP_MEMORY, CACHES_IN                                      optional: see below
#   ranks()          starts all ranks as one step, and waits for it

# --- Environment. Each line may be overridden by the site file or by your shell. ---

umask 077                                             # a run is its owner's business
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONUNBUFFERED=1
export PYTHONUTF8=${PYTHONUTF8:-1}                     # else model files are read in the locale's encoding
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}            # compute nodes seldom reach the internet; waiting for it costs minutes
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
export HDF5_USE_FILE_LOCKING=${HDF5_USE_FILE_LOCKING:-FALSE}   # shards never change once visible; locks fail on some file systems
export OMPI_MCA_btl=${OMPI_MCA_btl:-^ofi}              # its one-sided messages are unused, and cost 1 s

STEP_MEMORY=${STEP_MEMORY---mem=0}                     # so that no step waits for another; empty: no --mem
export SLURM_EXPORT_ENV=ALL                           # else `sbatch --export=NONE` makes srun pass nothing
unset ${!SRUN_@} ${!SQUEUE_@} ${!SCANCEL_@}           # options and filters inherited from your shell

needs() {            # needs KEY NAME…: end the job if a variable that a site key uses is not set
    local key=$1 name
    for name in "${@:2}"; do
        [ -n "${!name+set}" ] || refuse "$name is not set on $HERE, but the site key $key uses it: set it under setup \
in the site file, or write out what it stands for"
    done
}

enter_venv() {       # enter_venv FOLDER: activate a virtual environment
    [ -r "$1/bin/activate" ] || refuse "the site key venv leads to $1, which is no virtual environment on $HERE: \
put it on a file system that the nodes see"
    source "$1/bin/activate"
}

HERE=${SLURMD_NODENAME:-$HOSTNAME}

place_caches() {     # place_caches NAME: on the node itself; a home may be read-only there, and files go stale on NFS
    local place=${CACHES_IN:-${TMPDIR:-/tmp}} keeper    # HF_HOME is left alone: it has the models
    [ -w "$place" ] || place=/tmp
    export TBA_CACHES=$place/$1 TBA_COMPILED=${RUN:+$RUN/slurm/compiled.tar}
    for keeper in VLLM_CACHE_ROOT TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR FLASHINFER_WORKSPACE_BASE TVM_FFI_CACHE_DIR \
        TORCH_EXTENSIONS_DIR CUDA_CACHE_PATH HF_MODULES_CACHE MPLCONFIGDIR
    do
        export "$keeper=${!keeper:-$TBA_CACHES/$keeper}"
    done
}

# --- Messages, events and decisions ---

# Outside of subshells, output is captured by backticks: bash 5.2 loses a signal that arrives while it parses
# a $(…), and with it Slurm's request to stop.

say() { printf '[%(%F %T)T job %s restart %s] %s\n' -1 "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "$*"; }

event() {            # event NAME ['"KEY": VALUE']: append to the run's events; log_event in events.py has all
    [ ! -d "${RUN:-}" ] || printf '{"time": %s, "event": "%s", "job": "%s", "restarts": %s%s}\n' "`date +%s.%N`" "$1" \
        "$SLURM_JOB_ID" "${SLURM_RESTART_COUNT:-0}" "${2:+, $2}" >> "$RUN/events.jsonl"
}

in_json() { tr '\000-\037' ' ' | sed 's/[\\"]/\\&/g; s/ *$//'; }

refuse() {           # refuse SENTENCE: end the job for good, with a sentence about what only the user can fix
    local sentence
    sentence=`in_json <<< "$1"`
    event refused "\"sentence\": \"$sentence\""
    say "$1"
    exit 2
}

NEXT='' WITH=() FAILURES=0

ask() {              # ask TURN KEY=VALUE…: set NEXT, the next action, and WITH, its arguments, or end the job
    local answer
    NEXT='' WITH=()
    answer=`"${TBA[@]}" supervise "$1" "$RUN" "stop=$STOP" "failures=$FAILURES" "relaunches=${RELAUNCHES:-3}" \
        "requeue=${REQUEUE:-yes}" "save_seconds=$SAVE_SECONDS" "${@:2}"` || return
    read -r NEXT WITH <<< "${answer##*$'\n'}"
    read -ra WITH <<< "$WITH"
    [ "$NEXT" = exit ] || return 0
    [ ${#WITH[@]} = 1 ] || scancel "${WITH[@]:1}" 2>/dev/null    # the rest of the chain
    exit "${WITH[0]}"
}

# --- Being asked to stop ---
# Slurm sends USR1 to this shell (#SBATCH --signal=B:USR1@…), not to the ranks: it would kill the other commands
# below. From here on the shell catches the signal and passes it on; the ranks checkpoint at their next safe
# point and end, or end at once if they are still starting. The trainer also stops by itself, as long before
# TBA_JOB_END as its longest save has taken.

STOP=0 STEP='' GUARD=''
trap 'asked_to_stop' USR1
[ "${ASKED_EARLY:-0}" = 0 ] || STOP=1    # asked while slurm/tba_*.sbatch was making this script
trap ':' TERM        # Slurm is ending the job; stay to see the step off

asked_to_stop() {
    [ "$STOP" = 1 ] && return
    STOP=1
    # Requests to elastic searchers are no events of the run.
    [ "${TRAINERS:-0}" = 0 ] || { event signal; touch "${RUN:-}/slurm/asked" 2>/dev/null; }
    say "asked to stop: the ranks have $SAVE_SECONDS s for a checkpoint"
    pass_on
}

pass_on() {          # srun hands USR1 to every rank of every component
    [ -n "$STEP" ] && [ -z "$GUARD" ] || return 0
    repeat_stop "$STEP" >/dev/null 2>&1 &
    GUARD=$!
}

repeat_stop() {           # repeat_stop SRUN: srun may lose a signal that arrives while it starts the ranks
    local end=$((SECONDS + SAVE_SECONDS))
    while [ $SECONDS -lt $end ]; do kill -USR1 "$1" && sleep 2 || return; done
    kill -KILL "$1"  # a rank that hangs must not cost the requeue: at the wall time Slurm ends the job for good
}

# --- A step ---

await_step() {       # await_step SRUN [WATCHER…]: wait for the end of a step; return its status
    local code
    STEP=$1
    [ "$STOP" = 0 ] || pass_on               # asked just now
    while kill -0 "$1" 2>/dev/null; do wait "$1"; done    # a signal interrupts `wait`
    wait "$1"
    code=$?
    kill "${@:2}" $GUARD 2>/dev/null
    STEP='' GUARD=''
    return $code
}

await_folder() {     # wait until RUN is visible, if this node has lost it: both `ask` and a requeue need it
    local began=$SECONDS most=$ANSWER_SECONDS left
    if [ -n "${TBA_JOB_END:-}" ]; then       # what follows must fit in the job, too
        left=`date +%s`
        left=$((TBA_JOB_END - left - LEAVE_SECONDS))
        [ $most -le $left ] || most=$left
    fi
    until [ -r "$RUN/config.yaml" ] || [ $((SECONDS - began)) -ge $most ]; do
        [ "$STOP" = 0 ] || most=$((2 * ANSWER_PAUSE))
        sleep $ANSWER_PAUSE
    done
}

WATCH_SECONDS=60     # pause between two checks of the nodes
STEP_SECONDS=20      # the same for a step, whose trainers touch their files every ten seconds

draining() {         # print the first of this job's nodes being drained, if the job may continue elsewhere
    local nodes=${SLURM_JOB_NODELIST_HET_GROUP_0:-${SLURM_JOB_NODELIST:-}}
    [ "${REQUEUE:-yes}" = yes ] || grep -sxFA 1 "$SLURM_JOB_ID" "$RUN/slurm/chain" | grep -qvxF "$SLURM_JOB_ID" || return 0
    timeout 10 scontrol --oneliner show nodes "$nodes${SLURM_JOB_NODELIST_HET_GROUP_1:+,$SLURM_JOB_NODELIST_HET_GROUP_1}" \
        2>/dev/null | grep -v 'State=[^ ]*DOWN' | sed -n 's/^NodeName=\([^ ]*\) .*State=[^ ]*DRAIN.*/\1/p' | head -n 1
}

watch_nodes() {      # watch_nodes SRUN: stop in time for a node that is being drained
    local node
    while sleep $WATCH_SECONDS && kill -0 "$1" 2>/dev/null; do
        node=$(draining)
        [ -n "$node" ] || continue
        say "$node is being drained: leaving it"
        [ "${TRAINERS:-0}" = 0 ] || event draining "\"nodes\": \"$node\""
        kill -USR1 $$
        return
    done
}

teller_steps() {     # print the number of steps that run no ranks
    [ "${TBA[0]}" = srun ] && kill -0 "${TELLER:-none}" 2>/dev/null && echo 1 || echo 0
}

watch_step() {       # watch_step SRUN: end an srun that outlives its step
    # In a het step under PMIx, srun has one thread per component, and in some versions of Slurm (22.05 among them)
    # both may wait for the same thread at the end: it then hangs, long after the last rank has ended. Ranks at work
    # touch their files in RUN/owners; only if no trainer does Slurm is asked. Searchers of other jobs live on.
    local mark=$RUN/slurm/heard missed=-4 steps    # a step may take two minutes to start
    while touch "$mark" && sleep $STEP_SECONDS && kill -0 "$1" 2>/dev/null; do
        if [ -n "$(find "$RUN/owners" -name 'trainer*' -newer "$mark" -print -quit 2>/dev/null)" ]; then
            missed=0
        elif steps=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i 2>/dev/null); then
            missed=$((missed + 1))
            [ "$(grep -cE '\.[0-9]+$' <<< "$steps")" -le "$(teller_steps)" ] || missed=0
        fi
        [ $missed -ge 2 ] || continue
        event hung
        say "srun hangs although its step has ended: ending it"
        kill -KILL "$1"
        return
    done
}

WATCHDOG='' WATCHDOG_HOST=''

watch_leader() {     # in one allocation: keep a watchdog on the second node, which requeues the job if the first is lost
    # With --no-kill Slurm takes a lost node out of the allocation, and leaves a job without its script on the others.
    local hosts again="scontrol requeue"
    [ "${REQUEUE:-yes}" = yes ] || again=scancel
    hosts=(`allocated`)
    [ "${SLURM_HET_SIZE:-1}" = 1 ] && [ ${#hosts[@]} -gt 1 ] || return 0
    if kill -0 "${WATCHDOG:-none}" 2>/dev/null; then
        [ "$WATCHDOG_HOST" != "${hosts[1]}" ] || return 0
        kill "$WATCHDOG"     # an srun may outlive its node
    fi
    srun --no-kill --overlap $STEP_MEMORY --mpi=none --nodes=1 --ntasks=1 --nodelist="${hosts[1]}" bash -c '
        while sleep "$3"; do
            nodes=$(squeue --noheader --jobs="$1" --format=%N) && [ -n "$nodes" ] || continue
            scontrol show hostnames "$nodes" | grep -qxF "$2" || $4 "$1"
        done' watchdog "$ME" "${hosts[0]}" "$WATCH_SECONDS" "$again" </dev/null >/dev/null 2>&1 &
    WATCHDOG=$! WATCHDOG_HOST=${hosts[1]}
}

drop_orphans() {     # cancel old steps. If a het job's first node is lost, Slurm starts component 0 elsewhere
    # again, and the other ranks go on although their leader is gone. Their nodes still belong to the job.
    local group other steps seen end=$((SECONDS + 60))
    for ((group = 1; group < ${SLURM_HET_SIZE:-1}; group++)); do
        other=SLURM_JOB_ID_HET_GROUP_$group seen=''
        while steps=`squeue --noheader --steps --jobs="${!other}" --format=%i | grep -E '[.][0-9]+$'` && [ $SECONDS -lt $end ]; do
            [ "$steps" = "$seen" ] || { event orphan; say "cancelling steps left from before the requeue:" $steps; }
            seen=$steps
            scancel $steps
            sleep 1
        done
    done
}

# --- The job in Slurm ---

# Id of this job alone; SLURM_JOB_ID of the array's last job to start is also the id of the whole array.
ME=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
ME=${ME:-$SLURM_JOB_ID}
ANSWER_SECONDS=300   # longest wait for Slurm's controller, which may be moving to another machine
ANSWER_PAUSE=5
LEAVE_SECONDS=60     # time that a requeue takes

state() { squeue --noheader --jobs="$ME" --format=%T 2>/dev/null | head -n 1; }

ending() {           # whether Slurm is ending this job; failures are then no fault of ranks or nodes
    local state
    state=`state`
    [ "${state:-RUNNING}" != RUNNING ]       # no answer is no end
}

job_end() {          # export the end of this allocation, in unix seconds, unless it has no limit
    local end
    unset TBA_JOB_END
    end=`TZ=UTC SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e | head -n 1`
    [ -z "$end" ] || ! end=`TZ=UTC date +%s -d "$end" 2>/dev/null` || export TBA_JOB_END=$end
}

refuse_end() {       # exit if Slurm is ending this job: a cancelled job that requeues itself would run again
    local end=$((SECONDS + ANSWER_SECONDS)) state
    until state=`state`; [ -n "$state" ]; do
        [ $SECONDS -lt $end ] || { say "Slurm does not answer: submit the same run again to resume"; exit 1; }
        sleep $ANSWER_PAUSE
    done
    [ "$state" = RUNNING ] && return
    say "Slurm is ending this job ($state); nothing more to do here"
    exit 0
}

queue_again() {      # put this job back into the queue, and leave
    local end=$((SECONDS + ANSWER_SECONDS)) said
    say "back to the queue"
    trap '' TERM     # Slurm ends this shell now; only then can the job start again
    until said=`scontrol requeue "$ME" 2>&1`; do
        if [ $SECONDS -ge $end ] || [[ ! ${said,,} =~ contact|timed\ out|connect|communicat ]]; then
            say "Slurm refused to requeue: submit the same run again to resume ($said)"
            exit 1
        fi
        sleep $ANSWER_PAUSE
    done
    exclude_sick
    exit 0
}

# --- Nodes ---

allocated() {        # allocated [GROUP]: host names of all components, or of one, as Slurm has them now
    local job=$SLURM_JOB_ID other=SLURM_JOB_ID_HET_GROUP_${1:-}
    [ -n "${1:-}" ] && job=${!other}
    scontrol show hostnames "$(squeue --noheader --jobs="$job" --format='%i %N' | awk -v g="+${1:-}" \
        'NF == 2 && (g == "+" || index($1, g)) {print $2}' | paste -sd,)"
}

PROBE_SECONDS=60     # longest wait for the nodes to start a process

# Prints the name of its node, after "!" if the node does not see RUN, or "?" if it fails the health check.
CHECK='
    mark=
    for place in /dev/shm /tmp; do
        file=$(mktemp "$place/tba-check-XXXXXX") && head -c 1M /dev/zero > "$file" || mark=?
        rm -f "$file"
    done
    if type -P nvidia-smi > /dev/null; then
        counts=$(timeout 20 nvidia-smi --format=csv,noheader \
            --query-gpu=ecc.errors.uncorrected.volatile.total,remapped_rows.failure)
        case $? in                             # others: no driver, or this step sees no GPU
            0) ! grep -qE "(^|, )(Yes|[1-9][0-9]*)(,|$)" <<< "$counts" || mark=? ;;
            10 | 15 | 124) mark=? ;;           # no interrupts, fallen off the bus, hung
        esac
    fi
    [ -r "$0/config.yaml" ] || mark=!
    echo "$mark$SLURMD_NODENAME"'

probe() {            # probe "GROUP" HOST…: print the output of CHECK on each host that starts a process
    # A single step for all hosts; if one is lost, the output of the others remains.
    local group=()
    [ -n "$1" ] && group=("--het-group=$1")
    shift
    [ $# -gt 0 ] || return 0
    timeout -k 5 "$PROBE_SECONDS" srun --overlap $STEP_MEMORY --mpi=none "${group[@]}" --nodes=$# --ntasks=$# \
        --ntasks-per-node=1 --nodelist="$(joined "$@")" \
        bash -c "$CHECK" "$RUN" </dev/null 2>/dev/null
}

joined() { (IFS=,; echo "$*"); }

SICK=()              # nodes that have failed their check twice

place() {            # decide whether the ranks may start on the job's nodes
    local look het=0 hosts others='' wanted answers found ascending='' answer
    for look in 0 1; do                      # another place in the queue would cost more than a second look
        if [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
            het=1 hosts=`allocated 0` others=`allocated 1`
            answers=`probe 0 $hosts & probe 1 $others; wait`
            ascending=`scontrol show hostnames "$(scontrol show hostlistsorted "$(joined $hosts $others)")"`
        else
            hosts=`allocated`
            answers=`probe '' $hosts`
        fi
        wanted=($hosts $others) found=($answers)
        [ ${#found[@]} -ge ${#wanted[@]} ] || ! ending || return
        ask start "het=$het" "nodes=${NODES:-0}" "last_look=$look" "hosts=$hosts" "others=$others" "answers=$answers" \
            "ascending=$ascending" "trainers=$TRAINERS" "searchers=$SEARCHERS" \
            "trainer_nodes=${TRAINER_NODES:-0}" "searchers_per_node=${SEARCHERS_PER_NODE:-0}" || exit
        [ "$NEXT" = look ] || break
    done
    for answer in $answers; do [[ $answer != [\?\!]* ]] || SICK+=("${answer#?}"); done
    [ "$NEXT" = go ]
}

exclude_sick() {     # exclude SICK from the job's next start; possible once the job is pending again
    local job=$ME group name excluded kept before=() added=() lists=() note=$RUN/slurm/excluded-$ME
    [ ! -r "$note" ] || mapfile -t before < "$note"          # nodes that were added for each component
    [ -n "${before[*]}${SICK[*]}" ] || return 0
    for ((group = 0; group < ${SLURM_HET_SIZE:-1}; group++)); do
        [ "${SLURM_HET_SIZE:-1}" = 1 ] || job=$SLURM_JOB_ID+$group
        excluded=`scontrol --oneliner show job "$job" | sed -nE 's/.* ExcNodeList=([^ (]*).*/\1/p'`
        kept=() added[group]=
        for name in ${excluded:+`scontrol show hostnames "$excluded"`}; do
            [[ " ${before[group]:-} " = *" $name "* ]] || kept+=("$name")
        done
        for name in "${SICK[@]}"; do
            [[ " ${kept[*]} " = *" $name "* ]] || { kept+=("$name"); added[group]+="$name "; }
        done
        lists[group]=`joined "${kept[@]}"`
    done
    printf '%s\n' "${added[@]}" > "$note"
    for group in "${!lists[@]}"; do
        [ "${SLURM_HET_SIZE:-1}" = 1 ] || job=$SLURM_JOB_ID+$group
        scontrol update "JobId=$job" "ExcNodeList=${lists[group]}" \
            || say "the excluded nodes of job $job could not be changed"
    done
}

# --- To the end ---

tell() {             # start the process of run.notify, which reports the end of the run when it gets TERM
    "${TBA[@]}" watch "$RUN" --beside </dev/null >> "$RUN/slurm/notify.log" 2>&1 &
    TELLER=$!
    trap 'kill $TELLER 2>/dev/null && wait $TELLER' EXIT
}

refuse_second() {    # two jobs would train a run twice; and in a container `ask begin` cannot ask Slurm about the other
    local owner=''
    [ ! -r "$RUN/slurm/job" ] || read -r owner < "$RUN/slurm/job"
    [ -n "$owner" ] && [ "$owner" != "$SLURM_JOB_ID" ] || return 0
    case `squeue --noheader --jobs="$owner" --format='%T %k' 2>/dev/null | head -n 1` in
        "RUNNING $RUN" | "SUSPENDED $RUN" | "STOPPED $RUN")
            say "$RUN is already in use: Slurm job $owner; let it finish, or end it first: scancel $owner"
            exit 2 ;;
    esac
}

go_once() {          # go_once TURN: run the ranks to their end; return whether to start them again
    local code began=$SECONDS watchers
    ranks &
    STEP=$!
    watch_nodes "$STEP" &
    watchers=($!)
    [ "$1" != ended ] || { watch_step "$STEP" & watchers+=($!); }
    await_step "$STEP" "${watchers[@]}"
    code=$?
    await_folder
    ask "$1" "code=$code" "seconds=$((SECONDS - began))" "ending=`[ $code = 0 ] || ! ending || echo 1`"
    [ "$NEXT" = again ] || return
    FAILURES=${WITH[0]}
    sleep 2 || :         # a signal to all of the job's processes may end it
}

run_to_the_end() {   # start the ranks, again and again, until the run is finished
    mkdir -p "$RUN/slurm" || exit 2
    scontrol update "JobId=$SLURM_JOB_ID" "Comment=$RUN"
    refuse_second
    job_end
    ask begin "hosts=`allocated`" "chained=${CHAINED:-0}" || exit
    place_caches "${WITH[0]}"
    [ "${WITH[1]:-}" != tell ] || tell
    drop_orphans
    while [ "$STOP" = 0 ]; do
        watch_leader
        place || break
        NODES_LEFT=${WITH[0]} SEARCHERS=${WITH[1]}
        export TBA_ATTEMPT=${WITH[2]}        # other nodes may hold logs/latest of the start before
        job_end
        go_once ended || break
    done
    refuse_end
    ask leave || [ "$REQUEUE" != no ] || exit 1
    queue_again
}

# `bash -c "$KEEP" TIMES COMMAND…` runs an elastic searcher, and again after up to TIMES crashes in a row,
# while its neighbours go on. Slurm signals all processes of a step, including the searcher.
KEEP='
    trap asked=1 USR1 TERM INT
    while :; do
        began=$SECONDS
        "$@"
        code=$?
        [ -z "$asked" ] || exit $((code > 128 ? 0 : code))    # killed before it listened, it has left, too
        case $code in 0 | 2 | 3) exit $code ;; esac            # done, refused, no slot
        [ $((SECONDS - began)) -lt 300 ] || failures=0
        [ $((++failures)) -le "$0" ] || exit $code
        echo "searcher $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME ended with status $code" \
            "(failure $failures in a row): starting it again" >&2
        sleep 2
        [ -z "$asked" ] || exit 0
    done'

healthy() { [[ `bash -c "$CHECK" "$RUN" 2>/dev/null` != \?* ]] || { say "$HERE fails its check"; false; }; }

search_for_a_while() {    # in a job of one node: elastic searchers, until the run is finished
    unset TBA_ATTEMPT     # that is the name of an attempt of other ranks
    [ -r "$RUN/config.yaml" ] || { say "$HERE does not see $RUN: put it on a file system that all nodes share"; exit 2; }
    mkdir -p "$RUN/slurm"
    healthy || { sleep 5; healthy; } || SICK=("$HERE")
    ask join "array_job=$ME" "answers=${SICK[*]/#/?}" || exit
    if [ "$NEXT" = go ]; then
        place_caches "${WITH[0]}"
        while [ "$STOP" = 0 ]; do
            say "searching for $RUN on $HERE; searchers: $SEARCHERS"
            go_once searched || break
        done
    fi
    refuse_end
    [ "$REQUEUE" != no ] || { say "stopped, and this site does not requeue"; exit 75; }
    queue_again
}
