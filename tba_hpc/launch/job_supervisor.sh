# Shell library that every batch script of this project sources. It sets the environment of the ranks. Then, on
# the job's first node and outside any container, it does the work that needs Slurm's commands: it handles
# signals, nodes, job steps and the queue. It leaves each decision about what to do next to `tba supervise`
# (supervise.py). The batch script sets:
#   RUN                   the run directory, on a file system that all nodes share
#   TBA, RANK             commands, as arrays: `tba`, and `tba` as a rank of MPI
#   TRAINERS, SEARCHERS   numbers of ranks
#   NODES, TRAINER_NODES, SEARCHERS_PER_NODE   how one allocation is split between the roles; unused by het jobs
#   REQUEUE               yes or no: whether the job may requeue itself
#   RELAUNCHES            number of failures in a row after which the job still restarts the ranks
#   SAVE_SECONDS          time that the ranks get for a checkpoint once they are asked to stop, in seconds
#   CHAINED               optional; 1: the job follows another job of a chain
#   STEP_MEMORY           optional; the memory option of job steps
#   CACHES_IN             optional; folder in which engines keep compiled code
#   ranks()               function that starts all ranks as one job step, and waits until they end

# --- Environment. The site file or your shell may override each exported value. ---

umask 077                                              # only the owner can read a run
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONUNBUFFERED=1
export PYTHONUTF8=${PYTHONUTF8:-1}                     # otherwise Python reads model files in the locale's encoding
# Compute nodes seldom reach the internet, and attempts to reach it cost minutes.
export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}
export TOKENIZERS_PARALLELISM=${TOKENIZERS_PARALLELISM:-false}
# Shards need no locks, since they never change once visible. On some file systems locks fail.
export HDF5_USE_FILE_LOCKING=${HDF5_USE_FILE_LOCKING:-FALSE}
# Open MPI's transport `ofi` takes 1 s to start, and serves one-sided messages, which this project does not use.
export OMPI_MCA_btl=${OMPI_MCA_btl:-^ofi}

# Slurm passes on the limits of the shell that submitted the job. Those of login nodes are small.
for limit in t v d f l; do ulimit -S -$limit hard; done  # processor time, memory, data, files, locked memory

# Each step asks for all memory of its nodes, so that it does not wait for the memory of an earlier step.
# An empty value leaves the option out.
STEP_MEMORY=${STEP_MEMORY---mem=0}
export SLURM_EXPORT_ENV=ALL                            # after `sbatch --export=NONE` srun would pass on nothing
unset ${!SRUN_@} ${!SQUEUE_@} ${!SCANCEL_@}            # options and filters inherited from your shell

HERE=${SLURMD_NODENAME:-$HOSTNAME}

# needs KEY NAME…: end the job unless the variables NAME…, which the value of the site key KEY contains, are set.
needs() {
    local key=$1 name
    for name in "${@:2}"; do
        [ -n "${!name+set}" ] || refuse "$name is not set on $HERE, but the site key $key uses it: set it under setup \
in the site file, or write out what it stands for"
    done
}

# load_modules NAME…: load environment modules, or end the job if one of them is not loaded. The status of
# `module load` does not tell: it is also not 0 if a module is loaded, but one of its commands has failed.
load_modules() {
    module load "$@" && return       # before any `local`, which would hide variables that modules set
    local name loaded=yes
    for name; do [[ :${LOADEDMODULES:-}: = *:"$name"[:/]* ]] || loaded=''; done
    [ -n "$loaded" ] || refuse "module load $* fails on $HERE, see the log of the job: correct the site key modules, \
make the command module available under setup, or load the modules there"
}

# enter_venv FOLDER: activate a virtual environment, or end the job if there is none.
enter_venv() {
    [ -r "$1/bin/activate" ] || refuse "the site key venv leads to $1, which is no virtual environment on $HERE: \
put it on a file system that the nodes see"
    [ -x "$1/bin/python" ] || refuse "$1/bin/python leads to a Python that $HERE lacks: make the virtual environment \
with one that all nodes see"
    source "$1/bin/activate"
}

# End the job if this node lacks the program that runs `tba`: a Python, or what starts containers.
needs_program() {
    type "${TBA[0]}" >/dev/null 2>&1 || refuse "$HERE lacks ${TBA[0]}, or what it leads to: use one that all nodes see \
(site keys venv, modules and setup)"
}

# place_caches NAME: let libraries keep what they compile in a folder NAME of the node itself, because a home may
# be read-only on compute nodes, and NFS may serve outdated files. HF_HOME is not changed: the models are there.
place_caches() {
    local place=${CACHES_IN:-${TMPDIR:-/tmp}} keeper
    [ -w "$place" ] || place=/tmp
    export TBA_CACHES=$place/$1 TBA_COMPILED=${RUN:+$RUN/slurm/compiled.tar}
    for keeper in VLLM_CACHE_ROOT TRITON_CACHE_DIR TORCHINDUCTOR_CACHE_DIR FLASHINFER_WORKSPACE_BASE TVM_FFI_CACHE_DIR \
        TORCH_EXTENSIONS_DIR CUDA_CACHE_PATH HF_MODULES_CACHE MPLCONFIGDIR
    do
        export "$keeper=${!keeper:-$TBA_CACHES/$keeper}"
    done
}

# --- Messages, events and decisions ---

# ME: id of this job alone. In an array, SLURM_JOB_ID is not enough: for the job that starts last it is also the
# id of the whole array. this_job in events.py returns the same.
ME=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
ME=${ME:-$SLURM_JOB_ID}

# The shell that receives Slurm's signals captures output with backticks. bash 5.2 loses a signal that arrives
# while it parses a $(…), and this signal may be Slurm's request to stop. Functions that only run in subshells
# may use $(…).

say() { printf '[%(%F %T)T job %s restart %s] %s\n' -1 "$ME" "${SLURM_RESTART_COUNT:-0}" "$*"; }

# event NAME ['"KEY": VALUE']: append an event to the run's events. log_event in events.py lists all events.
event() {
    [ ! -d "${RUN:-}" ] || printf '{"time": %s, "event": "%s", "job": "%s", "restarts": %s%s}\n' "`date +%s.%N`" "$1" \
        "$ME" "${SLURM_RESTART_COUNT:-0}" "${2:+, $2}" >> "$RUN/events.jsonl"
}

in_json() { tr '\000-\037' ' ' | sed 's/[\\"]/\\&/g; s/ *$//'; }

# refuse SENTENCE: end the job for good, because of a problem that only the user can fix. SENTENCE says how.
refuse() {
    local sentence
    sentence=`in_json <<< "$1"`
    [ "${TRAINERS:-1}" = 0 ] || event refused "\"sentence\": \"$sentence\""
    say "$1"
    exit 2
}

NEXT='' WITH=() FAILURES=0

# ask STAGE KEY=VALUE…: let `tba supervise` decide what to do next. NEXT becomes the action, and WITH its
# arguments. The action `exit` ends the job, and cancels the rest of its chain. The status is not 0 if there is
# no answer.
ask() {
    local answer
    NEXT='' WITH=()
    answer=`"${TBA[@]}" supervise "$1" "$RUN" "stop=$STOP" "failures=$FAILURES" "relaunches=${RELAUNCHES:-3}" \
        "requeue=${REQUEUE:-yes}" "save_seconds=$SAVE_SECONDS" "${@:2}"` || return
    read -r NEXT WITH <<< "${answer##*$'\n'}"
    read -ra WITH <<< "$WITH"
    [ "$NEXT" = exit ] || return 0
    [ ${#WITH[@]} = 1 ] || scancel "${WITH[@]:1}" 2>/dev/null
    exit "${WITH[0]}"
}

# --- A request to stop ---
# Slurm sends USR1 to this shell alone (#SBATCH --signal=B:USR1@…). Sent to the whole job, it would also kill the
# other commands of this script. The shell passes the signal on to the ranks, which write a checkpoint at their
# next safe point and end. Ranks that are still starting end at once. In addition, the trainer stops by itself
# before TBA_JOB_END, with as much time left as its longest save has taken.

# STOP: 1 once the job is asked to stop. STEP: process id of the ranks' srun. GUARD: process id of repeat_stop.
STOP=0 STEP='' GUARD=''
trap 'asked_to_stop' USR1
[ "${ASKED_EARLY:-0}" = 0 ] || STOP=1    # USR1 came before, while slurm/tba_*.sbatch was making this script
trap ':' TERM        # Slurm is ending the job: stay until the step has ended

asked_to_stop() {
    [ "$STOP" = 1 ] && return
    STOP=1
    # The run's events do not record requests to the jobs of elastic searchers, which have no trainers.
    [ "${TRAINERS:-0}" = 0 ] || { event signal; touch "${RUN:-}/slurm/asked" 2>/dev/null; }
    say "asked to stop"
    pass_on
}

# Ask the ranks to stop if they have been started and not been asked yet.
pass_on() {
    local most="up to $SAVE_SECONDS s, or the GraceTime of a preemption,"
    local what="the ranks have $most for a checkpoint"
    [ -n "$STEP" ] && [ -z "$GUARD" ] || return 0
    [ "${TRAINERS:-0}" != 0 ] || what="the searchers have $most to seal what is finished"
    say "$what"
    repeat_stop "$STEP" 2>/dev/null &
    GUARD=$!
}

# repeat_stop SRUN: send USR1 to the process SRUN, which hands it to every rank of every component, until SRUN has
# ended. The signal is repeated because srun may lose one that arrives while it starts the ranks. After
# SAVE_SECONDS kill SRUN, because ranks that hang must not prevent the requeue: at its wall time Slurm ends a job
# for good. Before that USR2 has the ranks write to their logs where they hang.
repeat_stop() {
    local end=$((SECONDS + SAVE_SECONDS))
    while [ $SECONDS -lt $end ]; do kill -USR1 "$1" && sleep 2 || return; done
    say "the step of the ranks did not end in $SAVE_SECONDS s: killing it; a rank that hangs says in its log where"
    kill -USR2 "$1" && sleep 2
    kill -KILL "$1"
}

# --- A job step ---

# await_step SRUN [WATCHER…]: wait until the process SRUN ends, end the WATCHER processes, and return the exit
# status of SRUN.
await_step() {
    local code
    STEP=$1
    [ "$STOP" = 0 ] || pass_on                            # the request came before STEP was set
    while kill -0 "$1" 2>/dev/null; do wait "$1"; done    # a signal interrupts `wait`
    wait "$1"
    code=$?
    kill "${@:2}" $GUARD 2>/dev/null
    STEP='' GUARD=''
    return $code
}

# If this node no longer sees RUN, wait until it does, since both `ask` and a requeue need RUN. The wait ends early
# enough for a requeue within the job's time. After a request to stop it lasts at most two pauses.
await_folder() {
    local began=$SECONDS most=$ANSWER_SECONDS left
    if [ -n "${TBA_JOB_END:-}" ]; then
        left=`date +%s`
        left=$((TBA_JOB_END - left - LEAVE_SECONDS))
        [ $most -le $left ] || most=$left
    fi
    until [ -r "$RUN/config.yaml" ] || [ $((SECONDS - began)) -ge $most ]; do
        [ "$STOP" = 0 ] || most=$((2 * ANSWER_PAUSE))
        sleep $ANSWER_PAUSE
    done
}

WATCH_SECONDS=60     # pause between two checks of the nodes, in seconds
STEP_SECONDS=20      # pause between two checks of a step, in seconds; trainers touch their files every ten seconds

# Print the first of this job's nodes that is being drained. Print nothing if the job cannot continue on other
# nodes, because it neither requeues nor is followed by a job of its chain.
draining() {
    local nodes=${SLURM_JOB_NODELIST_HET_GROUP_0:-${SLURM_JOB_NODELIST:-}}
    [ "${REQUEUE:-yes}" = yes ] || grep -sxFA 1 "$ME" "$RUN/slurm/chain" | grep -qvxF "$ME" || return 0
    timeout 10 scontrol --oneliner show nodes "$nodes${SLURM_JOB_NODELIST_HET_GROUP_1:+,$SLURM_JOB_NODELIST_HET_GROUP_1}" \
        2>/dev/null | grep -v 'State=[^ ]*DOWN' | sed -n 's/^NodeName=\([^ ]*\) .*State=[^ ]*DRAIN.*/\1/p' | head -n 1
}

newest_attempt() { readlink "$RUN/logs/latest" || echo none; }

# Print the id of the run's own job, or of a component of it, if that is the next to get nodes, and may need the
# node of this job of elastic searchers. Without trainers, these searchers are of no use there. Print nothing if
# this job has left a node since the ranks were started last: then the run's job lacks something else.
kept_waiting() {
    local own id partition excluded
    [ "${TRAINERS:-0}" = 0 ] && [ "${REQUEUE:-yes}" = yes ] && read -r own 2>/dev/null < "$RUN/slurm/job" || return 0
    ! newest_attempt | cmp -s - "$RUN/slurm/left-$ME" || return 0
    [ -z "$(find "$RUN/owners" -name 'trainer*' -newermt "-$WATCH_SECONDS seconds" -print -quit 2>/dev/null)" ] || return 0
    timeout 10 squeue --noheader --jobs="$own" --states=PENDING --format='%r %i %P %x' 2>/dev/null | sed -n 's/^Resources //p' |
        while read -r id partition excluded; do
            ! scontrol show hostnames "$excluded" 2>/dev/null | grep -qxF "$HERE" || continue
            [ -z "$(timeout 10 sinfo --noheader --nodes="$HERE" --partition="$partition" --format=%n 2>/dev/null)" ] || echo "$id"
        done | head -n 1
}

# watch_nodes SRUN: while the process SRUN runs, ask this job to stop as soon as one of its nodes is being drained,
# or if two checks in a row find that the run's own job waits for this node.
watch_nodes() {
    local node waiting='' before
    while sleep $WATCH_SECONDS && kill -0 "$1" 2>/dev/null; do
        node=$(draining) before=$waiting
        [ -n "$node" ] || waiting=$(kept_waiting)
        if [ -n "$node" ]; then
            say "$node is being drained: this job leaves it"
            [ "${TRAINERS:-0}" = 0 ] || event draining "\"nodes\": \"$node\""
        elif [ -n "$waiting" ] && [ "$waiting" = "$before" ]; then
            say "job $waiting of this run waits for nodes, and may need $HERE: this job leaves it"
            newest_attempt > "$RUN/slurm/left-$ME"
        else
            continue
        fi
        kill -USR1 $$
        return
    done
}

# Print the number of steps that run no ranks: 1 if the process of run.notify is a step, else 0.
notifier_steps() {
    [ "${TBA[0]}" = srun ] && kill -0 "${NOTIFIER:-none}" 2>/dev/null && echo 1 || echo 0
}

# watch_step SRUN: kill an srun that hangs although its step has ended.
# In a het step under PMIx, srun has one thread per component. In some versions of Slurm, such as 22.05, both
# threads may wait for the same thread at the end. Then srun hangs long after the last rank has ended.
# Ranks at work touch their files in RUN/owners. Slurm is asked for the job's steps only if no trainer has done so.
# Files of searchers do not count, since searchers of other jobs go on.
watch_step() {
    local mark=$RUN/slurm/heard missed=-4 steps    # -4: a step may take two minutes to start
    while touch "$mark" && sleep $STEP_SECONDS && kill -0 "$1" 2>/dev/null; do
        if [ -n "$(find "$RUN/owners" -name 'trainer*' -newer "$mark" -print -quit 2>/dev/null)" ]; then
            missed=0
        elif steps=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i 2>/dev/null); then
            missed=$((missed + 1))
            [ "$(grep -cE '\.[0-9]+$' <<< "$steps")" -le "$(notifier_steps)" ] || missed=0
        fi
        [ $missed -ge 2 ] || continue
        event hung
        say "srun hangs although its step has ended: killing it"
        kill -KILL "$1"
        return
    done
}

WATCHDOG='' WATCHDOG_HOST=''

# Keep a watchdog on the second node of a job with one allocation. With --no-kill, Slurm takes a lost node out of
# the allocation. If this is the first node, which runs this script, the other nodes keep a job without a script.
# The watchdog then requeues the job, or cancels it if it may not requeue.
watch_leader() {
    local hosts again="scontrol requeue"
    [ "${REQUEUE:-yes}" = yes ] || again=scancel
    hosts=(`allocated`)
    [ "${SLURM_HET_SIZE:-1}" = 1 ] && [ ${#hosts[@]} -gt 1 ] || return 0
    if kill -0 "${WATCHDOG:-none}" 2>/dev/null; then
        [ "$WATCHDOG_HOST" != "${hosts[1]}" ] || return 0
        kill "$WATCHDOG"     # srun may live on after its node is lost
    fi
    srun --no-kill --overlap $STEP_MEMORY --mpi=none --nodes=1 --ntasks=1 --nodelist="${hosts[1]}" bash -c '
        while sleep "$3"; do
            nodes=$(squeue --noheader --jobs="$1" --format=%N) && [ -n "$nodes" ] || continue
            scontrol show hostnames "$nodes" | grep -qxF "$2" || $4 "$1"
        done' watchdog "$ME" "${hosts[0]}" "$WATCH_SECONDS" "$again" </dev/null >/dev/null 2>&1 &
    WATCHDOG=$! WATCHDOG_HOST=${hosts[1]}
}

# Cancel steps that are left from before a requeue. If the first node of a het job is lost, Slurm starts component
# 0 on another node. The ranks of the other components run on without their leader, on nodes that still belong to
# the job.
drop_orphans() {
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

ANSWER_SECONDS=300   # longest wait, in seconds, for Slurm's controller, which may be moving to another machine
ANSWER_PAUSE=5       # pause between two tries, in seconds
LEAVE_SECONDS=60     # time that a requeue takes at most, in seconds

state() { squeue --noheader --jobs="$ME" --format=%T 2>/dev/null | head -n 1; }

# Return whether Slurm is ending this job; if so, failures are no fault of ranks or nodes. If Slurm does not
# answer, it counts as not ending the job.
ending() {
    local state
    state=`state`
    [ "${state:-RUNNING}" != RUNNING ]
}

# Export the end of this allocation as TBA_JOB_END, in unix seconds; unset TBA_JOB_END if there is no time limit.
job_end() {
    local end
    unset TBA_JOB_END
    end=`TZ=UTC SLURM_TIME_FORMAT=standard squeue --noheader --jobs="$ME" --format=%e | head -n 1`
    [ -z "$end" ] || ! end=`TZ=UTC date +%s -d "$end" 2>/dev/null` || export TBA_JOB_END=$end
}

# Exit if Slurm is ending this job, since a cancelled job that requeues itself would run again.
refuse_end() {
    local end=$((SECONDS + ANSWER_SECONDS)) state
    until state=`state`; [ -n "$state" ]; do
        [ $SECONDS -lt $end ] || { say "Slurm does not answer: submit the same run again to resume"; exit 1; }
        sleep $ANSWER_PAUSE
    done
    case $state in
        RUNNING) return ;;
        PENDING | REQUEUE*) say "Slurm has put this job back into the queue ($state)" ;;
        *) say "Slurm is ending this job ($state); nothing more to do here" ;;
    esac
    exit 0
}

# Put this job back into the queue, and exit.
queue_again() {
    local end=$((SECONDS + ANSWER_SECONDS)) said
    say "back to the queue"
    trap '' TERM     # after a requeue Slurm sends TERM to this shell, which has to finish exclude_sick first
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

# allocated [GROUP]: print the host names that Slurm now lists for the job, of all components or of one.
allocated() {
    local job=$SLURM_JOB_ID other=SLURM_JOB_ID_HET_GROUP_${1:-}
    [ -n "${1:-}" ] && job=${!other}
    scontrol show hostnames "$(squeue --noheader --jobs="$job" --format='%i %N' | awk -v g="+${1:-}" \
        'NF == 2 && (g == "+" || index($1, g)) {print $2}' | paste -sd,)"
}

PROBE_SECONDS=60     # longest wait for the nodes to start a process, in seconds

# Program of the health check of a node; its $0 is RUN. It prints "checked" and the node's name, after "!" if it does
# not see RUN, or after "?" if it cannot write to /dev/shm or /tmp or if its GPUs have errors.
CHECK='
    mark=
    for place in /dev/shm /tmp; do
        file=$(mktemp "$place/tba-check-XXXXXX") && head -c 1M /dev/zero > "$file" || mark=?
        rm -f "$file"
    done
    if type -P nvidia-smi > /dev/null; then
        # Where the driver is loaded anew for each program, nvidia-smi takes 30 s with eight GPUs.
        counts=$(timeout 45 nvidia-smi --format=csv,noheader \
            --query-gpu=ecc.errors.uncorrected.volatile.total,remapped_rows.failure)
        case $? in
            0) ! grep -qE "(^|, )(Yes|[1-9][0-9]*)(,|$)" <<< "$counts" || mark=? ;;
            10 | 15) mark=? ;;                 # interrupts are missing, or a GPU has fallen off the bus
            18) mark=? ;;                      # the driver has another version than its library
            # An unknown error of a GPU. NVML also gives one if this step may not open the driver.
            255) [[ $counts = *"initialize NVML"* ]] || mark=? ;;
            124) mark=? ;;                     # a hang
        esac                                   # other statuses: no driver, or this step sees no GPU
    fi
    [ -r "$0/config.yaml" ] || mark=!
    printf "\nchecked %s\n" "$mark$SLURMD_NODENAME"'

# probe "GROUP" HOST…: run CHECK on all hosts in one step, and print its output. A host that does not start a
# process prints nothing. GROUP: component of a het job, or "".
probe() {
    local group=()
    [ -n "$1" ] && group=("--het-group=$1")
    shift
    [ $# -gt 0 ] || return 0
    timeout -k 5 "$PROBE_SECONDS" srun --overlap $STEP_MEMORY --mpi=none "${group[@]}" --nodes=$# --ntasks=$# \
        --ntasks-per-node=1 --nodelist="$(joined "$@")" \
        bash -c "$CHECK" "$RUN" </dev/null 2>/dev/null | checked
}

joined() { (IFS=,; echo "$*"); }

# Filter the output of CHECK: keep the names, and drop whatever else the shells of a site print.
checked() { sed -n 's/^checked //p'; }

SICK=()              # nodes that failed the last check before a start

# Check the job's nodes, and let `tba supervise` decide whether the ranks start on them. Return whether they do. If
# nodes do not answer or fail, all are checked once more, since a requeue would cost more time than that.
place() {
    local look het=0 hosts others='' wanted answers found ascending='' answer
    for look in 0 1; do
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

# Exclude the nodes in SICK from the job's next start, and no longer exclude those that this function excluded
# before. Slurm allows such changes once the job is pending again.
exclude_sick() {
    # before, added: by component, the nodes that this function excluded before, and those that it excludes now.
    local job=$ME group name excluded kept before=() added=() lists=() note=$RUN/slurm/excluded-$ME
    [ ! -r "$note" ] || mapfile -t before < "$note"
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
            || say "Slurm did not change the excluded nodes of job $job"
    done
}

# --- The whole job ---

# Start the process of run.notify. At the end of this script it gets TERM, and then reports the end of the run.
start_notifier() {
    "${TBA[@]}" watch "$RUN" --beside </dev/null >> "$RUN/slurm/notify.log" 2>&1 &
    NOTIFIER=$!
    trap 'kill $NOTIFIER 2>/dev/null && wait $NOTIFIER' EXIT
}

# End this job if another job is at work on the run, as two jobs would train it twice. `ask begin` checks that too,
# but it cannot ask Slurm if it runs in a container.
refuse_second() {
    local owner=''
    [ ! -r "$RUN/slurm/job" ] || read -r owner < "$RUN/slurm/job"
    [ -n "$owner" ] && [ "$owner" != "$ME" ] || return 0
    case `squeue --noheader --jobs="$owner" --format='%T %k' 2>/dev/null | head -n 1` in
        "RUNNING $RUN" | "SUSPENDED $RUN" | "STOPPED $RUN")
            say "$RUN is already in use: Slurm job $owner; let it finish, or end it first: tba stop $RUN --wait 600"
            exit 2 ;;
    esac
}

# go_once STAGE: start the ranks, wait until they end, and ask STAGE what to do. Return whether to start them again.
go_once() {
    local code began=$SECONDS watchers
    ranks &
    STEP=$!
    watch_nodes "$STEP" 2>/dev/null &    # else bash says "Terminated" when Slurm sends TERM to all processes
    watchers=($!)
    [ "$1" != ended ] || { watch_step "$STEP" 2>/dev/null & watchers+=($!); }
    await_step "$STEP" "${watchers[@]}"
    code=$?
    await_folder
    ask "$1" "code=$code" "seconds=$((SECONDS - began))" "ending=`[ $code = 0 ] || ! ending || echo 1`"
    [ "$NEXT" = again ] || return
    FAILURES=${WITH[0]}
    sleep 2 || :         # a signal to all processes of the job may end this sleep
}

# The main function of a run's job: start the ranks, again and again, until the run is finished or the job leaves.
run_to_the_end() {
    mkdir -p "$RUN/slurm" || exit 2
    needs_program
    scontrol update "JobId=$ME" "Comment=$RUN"
    refuse_second
    job_end
    ask begin "hosts=`allocated`" "chained=${CHAINED:-0}" || exit
    place_caches "${WITH[0]}"
    [ "${WITH[1]:-}" != notify ] || start_notifier
    drop_orphans
    while [ "$STOP" = 0 ]; do
        watch_leader
        place || break
        NODES_LEFT=${WITH[0]} SEARCHERS=${WITH[1]}
        export TBA_ATTEMPT=${WITH[2]}        # on other nodes the link logs/latest may still lead to the last attempt
        job_end
        go_once ended || break
    done
    refuse_end
    ask leave || [ "$REQUEUE" != no ] || exit 1
    queue_again
}

# Program that runs an elastic searcher: `bash -c "$KEEP" TIMES COMMAND…`. It starts COMMAND again after up to TIMES
# crashes in a row, while the other searchers of the node go on. Slurm sends a signal to all processes of a step:
# to this program and to the searcher.
KEEP='
    trap asked=1 USR1 TERM INT
    while :; do
        began=$SECONDS
        "$@"
        code=$?
        # Status above 128: the signal killed the searcher before it caught signals. It counts as stopped.
        [ -z "$asked" ] || exit $((code > 128 ? 0 : code))
        case $code in 0 | 2 | 3) exit $code ;; esac            # finished, refused, no slot
        [ $((SECONDS - began)) -lt 300 ] || failures=0
        [ $((++failures)) -le "$0" ] || exit $code
        echo "searcher $SLURM_PROCID of $SLURM_NTASKS on $SLURMD_NODENAME ended with status $code" \
            "(failure $failures in a row): starting it again" >&2
        sleep 2
        [ -z "$asked" ] || exit 0
    done'

# Return whether this node passes the health check; say so if it does not.
healthy() { [[ `bash -c "$CHECK" "$RUN" 2>/dev/null | checked` != \?* ]] || { say "$HERE fails the health check"; false; }; }

# The main function of a job of elastic searchers, which has one node: run searchers until the run is finished or
# the job leaves.
search_for_a_while() {
    unset TBA_ATTEMPT     # an inherited value would name an attempt of other ranks
    [ -r "$RUN/config.yaml" ] || { say "$HERE does not see $RUN: put it on a file system that all nodes share"; exit 2; }
    mkdir -p "$RUN/slurm"
    needs_program
    healthy || { sleep 5; healthy; } || SICK=("$HERE")
    ask join "array_job=$ME" "answers=${SICK[*]/#/?}" || exit
    if [ "$NEXT" = go ]; then
        place_caches "${WITH[0]}"
        while [ "$STOP" = 0 ]; do
            say "starting elastic searchers of $RUN on $HERE: $SEARCHERS"
            go_once searched || break
        done
    fi
    refuse_end
    [ "$REQUEUE" != no ] || { say "stopped; this site does not allow a requeue"; exit 75; }
    queue_again
}
