#!/usr/bin/env bash
# Usage: bash launch_multi_gpu.sh [flags] [-- flags for the trainer]
#
# Asks how to train, shows the plan and the exact command, and runs it.
# A flag answers its question in advance; Enter takes the answer in [brackets].
#
#   --mode ddp|dp|single   one process per GPU, one process for all, one device
#   --gpus LIST            which GPUs: numbers (0,1), all, or none (use the CPU)
#   --nproc N              how many GPUs (idle ones first), or CPU processes
#   --config NAME          a recipe of configs/, or a YAML file
#   --data-dir DIR         folder that holds the dataset
#   --batch-size N         samples per device and micro-batch, or auto
#   --save-dir DIR         folder of the run (default: the trainer names one)
#   --resume auto|never    continue a run that is there, or start afresh
#   --yes                  take the default of every question
#   --dry-run              show the plan and the command, run nothing
#   --help                 show this
#
# Examples:
#   bash launch_multi_gpu.sh --yes -- --epochs 5
#   bash launch_multi_gpu.sh --gpus 0,1 --config har --data-dir data/har
#
# Exit codes: the trainer's; 2 for a wrong request; 130 when you cancel.

# shellcheck disable=SC2329 # the checks are called by name
#
# Rules of this file: commands are arrays and nothing typed is evaluated; every number of the plan comes from the
# trainer's own --dry-run --json; the conversation is on stderr, stdout is the trainer's; nothing that bash 3.2 lacks.
set -euo pipefail
shopt -s nocasematch # DDP is ddp

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
MODE='' GPUS='' WORKERS='' RECIPE='' BATCH='' DATA_DIR='' SAVE_DIR='' RESUME='' # answers, empty until settled
YES='' DRY_RUN='' EXTRA=()
GPU_ID=() GPU_ROW=() GPU_FREE=() GPU_STATE=() NO_GPU='' CORES=1 # the machine, one entry per GPU
RECIPES=() RECIPE_TEXT=()
ANSWER='' WHY='' CHOICES=() # a check leaves an answer, or the reason against it
PLAN='' PLAN_CODE=0 PROBLEM='' NOTES='' ENVIRONMENT=() FLAGS=() COMMAND=()
DP_IDS='' STOPPED=ended BOLD='' DIM='' RED='' PLAIN=''
[[ ! -t 2 || -n ${NO_COLOR-} || ${TERM:-dumb} == dumb ]] ||
    BOLD=$'\033[1m' DIM=$'\033[2m' RED=$'\033[31m' PLAIN=$'\033[0m'

say() { printf '%s\n' "$@" >&2 || :; } # a terminal that has gone must not hide the trainer's exit code
leave() { say "${@:2}" && exit "$1"; }
refuse() { leave 2 "launch_multi_gpu.sh: $1"; }
usage() { sed -n '2,/^$/ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
joined() { (IFS=, && printf '%s' "$*"); }
count_of() { tr ',' '\n' <<<"$1" | grep -c .; } # of a list with commas
counted() { printf '%s %s' "$1" "$2$( (($1 == 1)) || printf s)"; }

show_choice() { # NUMBER NAME TEXT: one entry of a menu, folded to the terminal
    local columns
    columns=$(tput cols 2>/dev/null) || columns=80
    printf "  $BOLD%2d  %-14s$PLAIN%s\n" "$1" "$2" \
        "$(fold -s -w $((columns > 60 ? columns - 21 : 40)) <<<"$3" | sed '2,$ s/^/                    /')" >&2
}

settle() { # FLAG VALUE QUESTION DEFAULT CHECK: obey or refuse a flag's value; --yes: the default; else ask until right
    local line
    if [[ -n $2$YES ]]; then
        "$5" "${2:-$4}" || refuse "$1 ${2:-$4}: $WHY"
        return
    fi
    while :; do
        printf '%s' "$BOLD$3$PLAIN${4:+ [$4]}: " >&2
        read -r line || leave 2 '' "launch_multi_gpu.sh: the input ended at \"$3\"; nothing was started."
        "$5" "${line:-$4}" && return
        say "  $RED$WHY$PLAIN"
    done
}

# --- What makes an answer right --------------------------------------------------------------------------------------

check_number() {
    local whole='^[1-9][0-9]{0,8}$'
    WHY="a whole number from 1 up is needed"
    [[ $1 =~ $whole ]] && ANSWER=$1
}

check_batch_size() { if [[ $1 == auto ]]; then ANSWER=auto; else check_number "$1"; fi; }

check_choice() { # by name or by its number in CHOICES
    local i
    for ((i = 0; i < ${#CHOICES[@]}; i++)); do
        [[ $1 == "$((i + 1))" || $1 == "${CHOICES[i]}" ]] && ANSWER=${CHOICES[i]} && return
    done
    WHY="answer 1 to ${#CHOICES[@]}, or one of: $(joined "${CHOICES[@]}" | sed 's/,/, /g')"
    return 1
}

check_yes() {
    WHY="answer y or n"
    case $1 in y | yes) ANSWER=yes ;; n | no) ANSWER=no ;; *) return 1 ;; esac
}

check_resume() { CHOICES=(auto never) && check_choice "$1"; }

check_mode() { # by name, and against the machine, --gpus and --nproc
    CHOICES=(ddp dp single)
    check_choice "$1" || return
    if [[ $ANSWER == dp ]]; then
        WHY="dp needs two GPUs or more; usable here: ${#GPU_ID[@]}${WORKERS:+, asked for: $WORKERS}"
        ((${#GPU_ID[@]} > 1 && ${WORKERS:-2} > 1))
    elif [[ $ANSWER == single ]]; then
        WHY="single uses one device; asked for: ${WORKERS:-1}"
        ((${WORKERS:-1} == 1))
    fi
}

check_workers() {
    check_number "$1" || return
    WHY="there are $(counted ${#GPU_ID[@]} GPU) to use, and each takes one worker"
    ((${#GPU_ID[@]} == 0 || $1 <= ${#GPU_ID[@]})) || return 1
    WHY="dp needs two GPUs or more"
    [[ $MODE != dp || $1 -gt 1 ]]
}

check_gpus() { # "0,1", "0 1" or "all": GPUs that are here, each once, as many as asked for
    local list=$1 all gpu picked=, shape='^[0-9]+([ ,]+[0-9]+)*$'
    all=$(joined "${GPU_ID[@]}")
    [[ $list == all ]] && list=$all
    WHY="numbers with commas between them are needed, such as 0,1"
    [[ $list =~ $shape ]] || return 1
    for gpu in ${list//,/ }; do
        WHY="there is no GPU $gpu to use here; there are $all"
        [[ ,$all, == *,$gpu,* ]] || return 1
        WHY="GPU $gpu is named twice"
        [[ $picked != *,$gpu,* ]] || return 1
        picked+=$gpu,
    done
    ANSWER=${picked#,} ANSWER=${ANSWER%,}
    WHY="name $WORKERS of $all"
    [[ -z $WORKERS || $(count_of "$ANSWER") == "$WORKERS" ]]
}

check_recipe() { # a number or name of the menu, or a YAML file
    WHY="there is no such file"
    if [[ $1 == */* || $1 == *.y*ml ]]; then
        [[ -f $1 ]] && ANSWER=$1
    else
        CHOICES=(${RECIPES[@]+"${RECIPES[@]}"}) && check_choice "${1//-/_}"
    fi
}

check_folder() {
    ANSWER=${1/#\~\//${HOME-}/}
    WHY="there is no such folder"
    [[ -d $ANSWER ]]
}

# --- The machine -----------------------------------------------------------------------------------------------------

find_programs() { # the project's own environment where there is one; after `pip install` all lies beside this script
    local beside=$HERE/
    [[ $HERE -ef $PWD ]] && beside=''
    PYTHON=python3 MAIN=("${beside}main_multi_gpu.py")
    if [[ -x $HERE/.venv/bin/python ]]; then
        PYTHON=$beside.venv/bin/python
    elif [[ ! -f $HERE/main_multi_gpu.py && -x $HERE/python ]]; then
        PYTHON=$HERE/python MAIN=(-m main_multi_gpu)
    fi
    command -v "$PYTHON" >/dev/null || refuse "python3 is not on the PATH; install it, then run: make quickstart"
    [[ ${MAIN[0]} == -m || -f ${MAIN[0]} ]] || refuse "main_multi_gpu.py is not beside this script, in $HERE"
    TORCHRUN=(torchrun)
    [[ $PYTHON != */* ]] || TORCHRUN=("${PYTHON%/*}/torchrun")
    command -v "${TORCHRUN[0]}" >/dev/null || TORCHRUN=("$PYTHON" -m torch.distributed.run)
}

find_recipes() { # as the trainer lists them
    local name text list
    list=$("$PYTHON" "${MAIN[@]}" recipes --json | "$PYTHON" -c 'import json, sys
for recipe in json.load(sys.stdin): print(recipe["name"], recipe["description"])' 2>/dev/null) ||
        refuse "$PYTHON ${MAIN[*]} does not run; make quickstart installs what it needs"
    while read -r name text; do
        [[ -z $name ]] || { RECIPES+=("$name") && RECIPE_TEXT+=("$text"); }
    done <<<"$list"
}

detect_gpus() { # fills GPU_*, or says in NO_GPU why there is none to use
    local visible=${CUDA_VISIBLE_DEVICES-all} numbers='^[0-9]+(,[0-9]+)*$' found id name total free load limit=()
    CORES=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    [[ $GPUS != none ]] || { NO_GPU="--gpus none" GPUS='' ENVIRONMENT=(CUDA_VISIBLE_DEVICES=) && return; }
    [[ -n $visible && $visible != -1 ]] || { NO_GPU="CUDA_VISIBLE_DEVICES hides them" && return; }
    [[ $visible == all || $visible =~ $numbers ]] ||
        refuse "CUDA_VISIBLE_DEVICES=$visible: this launcher knows GPUs by number; set numbers, or unset it"
    command -v nvidia-smi >/dev/null || { NO_GPU="no nvidia-smi" && return; }
    ! command -v timeout >/dev/null || limit=(timeout 30) # a driver in trouble can hang it
    found=$(${limit[@]+"${limit[@]}"} nvidia-smi --format=csv,noheader,nounits \
        --query-gpu=index,name,memory.total,memory.free,utilization.gpu 2>&1) ||
        { NO_GPU="nvidia-smi failed: ${found%%$'\n'*}" && return; }
    while IFS=, read -r id name total free load; do
        [[ $id =~ ^[0-9]+$ && ($visible == all || ,$visible, == *,$id,*) ]] || continue
        add_gpu "$id" "${name# }" "${total# }" "${free# }" "${load# }"
    done <<<"$found"
    ((${#GPU_ID[@]} > 0)) || NO_GPU="nvidia-smi lists none"
}

add_gpu() { # ID NAME TOTAL FREE LOAD: memory in MiB, load in percent; "[N/A]" counts as unused
    local total=${3//[!0-9]/} free=${4//[!0-9]/} load=${5//[!0-9]/} state=idle room='?'
    [[ -z $total || -z $free ]] || room="$((free / 1024)) of $((total / 1024)) GiB"
    ((${load:-0} <= 10 && (total - free <= 1024 || (total - free) * 10 <= total))) || state='in use'
    [[ $2 == "${FIRST_NAME:=$2}" ]] || ENVIRONMENT=(CUDA_DEVICE_ORDER=PCI_BUS_ID) # else CUDA counts the fastest first
    GPU_ID+=("$1") GPU_FREE+=("${free:-0}") GPU_STATE+=("$state")
    GPU_ROW+=("$(printf '%3s  %-36.36s  %14s  %4s %%  %s' "$1" "$2" "$room" "$5" "$state")")
}

idle_count() { printf '%s\n' ${GPU_STATE[@]+"${GPU_STATE[@]}"} | grep -c '^idle$' || :; }

preferred() { # N: that many GPUs as a list, idle ones first, then those with the most free memory
    local i
    for ((i = 0; i < ${#GPU_ID[@]}; i++)); do
        if [[ ${GPU_STATE[i]} == idle ]]; then echo "0 0 ${GPU_ID[i]}"; else echo "1 ${GPU_FREE[i]} ${GPU_ID[i]}"; fi
    done | sort -k1,1n -k2,2nr -k3,3n | sed -n "1,$1 s/.* //p" | sort -n | tr '\n' , | sed 's/,$//'
}

show_machine() {
    local gpus=${#GPU_ID[@]}
    say "${BOLD}This machine: $(counted "$gpus" GPU) to use, $(counted "$CORES" "CPU core")$PLAIN${NO_GPU:+ ($NO_GPU)}"
    ((gpus == 0)) ||
        say "  $DIM$(printf '%3s  %-36s  %14s  %6s' GPU name 'free memory' load)$PLAIN" "${GPU_ROW[@]/#/  }"
}

# --- The questions ---------------------------------------------------------------------------------------------------

obey_flags() { # all that were given, before the first question
    if [[ -n $GPUS ]]; then
        ((${#GPU_ID[@]} > 0)) || refuse "--gpus $GPUS: no GPU can be used here ($NO_GPU)"
        settle --gpus "$GPUS" '' '' check_gpus
        GPUS=$ANSWER WORKERS=$(count_of "$ANSWER")
    fi
    [[ -z $WORKERS ]] || settle --nproc "$WORKERS" '' '' check_workers
    [[ -z $MODE ]] || { settle --mode "$MODE" '' '' check_mode && MODE=$ANSWER; }
    [[ -z $RECIPE ]] || settle --config "$RECIPE" '' '' check_recipe
    [[ -z $DATA_DIR ]] || { settle --data-dir "$DATA_DIR" '' '' check_folder && DATA_DIR=$ANSWER; }
    [[ -z $BATCH ]] || settle --batch-size "$BATCH" '' '' check_batch_size
    [[ -z $RESUME ]] || { settle --resume "$RESUME" '' '' check_resume && RESUME=$ANSWER; }
}

settle_mode() {
    local gpus=${#GPU_ID[@]} share best=ddp because
    share=${WORKERS:-$(if ((gpus > 0)); then idle_count; else echo "$CORES"; fi)}
    because="$(counted "$share" "$(if ((gpus > 0)); then echo GPU; else echo "CPU core"; fi)") can share it"
    ((share > 1)) || best=single because="one device is free"
    if [[ -z $MODE$YES ]]; then
        say '' "${BOLD}How should the work be shared?$PLAIN"
        show_choice 1 ddp "One process per device, each with the whole model; fastest."
        show_choice 2 dp "One process feeds several GPUs; slower, needs no launcher."
        show_choice 3 single "One process on one device."
        say "  Recommended here: $best, since $because."
    fi
    settle --mode "$MODE" Mode "$best" check_mode
    MODE=$ANSWER
}

settle_devices() { # how many, and which
    local gpus=${#GPU_ID[@]} default=2 what="CPU processes" i
    ((gpus == 0)) || default=$(idle_count) what=GPUs
    ((default > 1)) || default=$([[ $MODE == dp ]] && echo 2 || echo 1)
    [[ $MODE != single ]] || WORKERS=1
    settle --nproc "$WORKERS" "How many $what" "$default" check_workers
    WORKERS=$ANSWER
    ((gpus > 0)) || return 0
    ((gpus > WORKERS)) || GPUS=all
    settle --gpus "$GPUS" "Which of them" "$(preferred "$WORKERS")" check_gpus
    GPUS=$ANSWER
    for ((i = 0; i < gpus; i++)); do
        [[ ${GPU_STATE[i]} == idle || ,$GPUS, != *,${GPU_ID[i]},* ]] ||
            say "  Note: GPU ${GPU_ID[i]} is in use by others."
    done
    # Under a CUDA_VISIBLE_DEVICES of the user's, --gpu-ids would count within it: narrow it, then count from 0.
    DP_IDS=$GPUS
    [[ -z ${CUDA_VISIBLE_DEVICES-} ]] || DP_IDS=$(seq -s, 0 $((WORKERS - 1)))
    [[ $MODE == dp && $DP_IDS == "$GPUS" ]] || ENVIRONMENT+=("CUDA_VISIBLE_DEVICES=$GPUS")
}

settle_recipe() {
    local i default=${RECIPES[0]-}
    [[ -n $RECIPE || -n $default ]] || return 0
    [[ -n $RECIPE$YES ]] || say '' "${BOLD}What to train?$PLAIN"
    for ((i = 0; i < ${#RECIPES[@]}; i++)); do
        [[ ${RECIPES[i]} != digits ]] || default=digits
        [[ -n $RECIPE$YES ]] || show_choice $((i + 1)) "${RECIPES[i]}" "${RECIPE_TEXT[i]}"
    done
    settle --config "$RECIPE" Recipe "$default" check_recipe
    RECIPE=$ANSWER
}

settle_plan() { # ask the trainer, and the user for what it misses
    until make_plan; do
        say "$PROBLEM"
        if [[ $PROBLEM == *--data-dir* && -z $YES ]]; then
            settle '' '' "Folder that holds the dataset" '' check_folder
            DATA_DIR=$ANSWER
        elif [[ $PROBLEM == *--batch-size* && -z $YES ]]; then
            settle '' '' "Batch size per device" '' check_batch_size
            BATCH=$ANSWER
        else
            exit "$PLAN_CODE"
        fi
    done
}

settle_resume() { # only where the run folder holds a run
    [[ -z $RESUME$YES && -e $(plan_value save_dir)/config.yaml ]] || return 0
    say '' "There is a run in $(plan_value save_dir)" "  (it $(plan_value resume))"
    settle '' '' "Continue it? (n starts a new run in a new folder)" y check_yes
    [[ $ANSWER == no ]] || { RESUME=auto && return; }
    RESUME=never SAVE_DIR=''
    settle_plan
}

settle_batch_size() { # a run that is continued keeps its own
    [[ -z $BATCH && $RESUME != auto ]] || return 0
    settle --batch-size '' "Batch size per device" "$(plan_value batch_size)" check_batch_size
    [[ $ANSWER != "$(plan_value batch_size)" ]] || return 0
    BATCH=$ANSWER
    settle_plan
    settle_resume
}

# --- The plan and the command ----------------------------------------------------------------------------------------

set_flags() { # the same for the plan and for the run
    case $MODE in
        ddp) FLAGS=(--multi-gpu ddp) ;;
        dp) FLAGS=(--multi-gpu dp --gpu-ids "$DP_IDS") ;;
        single) FLAGS=(--multi-gpu none) ;;
    esac
    [[ -z $RECIPE ]] || FLAGS+=(--config "$RECIPE")
    [[ -z $DATA_DIR ]] || FLAGS+=(--data-dir "$DATA_DIR")
    [[ -z $BATCH ]] || FLAGS+=(--batch-size "$BATCH")
    [[ -z $SAVE_DIR ]] || FLAGS+=(--save-dir "$SAVE_DIR")
    [[ -z $RESUME ]] || FLAGS+=(--resume "$RESUME")
    FLAGS+=(${EXTRA[@]+"${EXTRA[@]}"})
}

make_plan() { # PLAN is the trainer's JSON, PROBLEM what it said instead
    local processes=()
    PLAN_CODE=2
    set_flags
    [[ $MODE != ddp ]] || processes=(--nproc-per-node "$WORKERS")
    [[ ! -t 2 ]] || printf '%s' "${DIM}The trainer works out the plan...$PLAIN" >&2
    PLAN=$(env ${ENVIRONMENT[@]+"${ENVIRONMENT[@]}"} "$PYTHON" "${MAIN[@]}" "${FLAGS[@]}" \
        ${processes[@]+"${processes[@]}"} --dry-run --json 2>"$NOTES") || { PLAN_CODE=$? PLAN=''; }
    [[ ! -t 2 ]] || printf '\r%34s\r' '' >&2
    PROBLEM=$(cat "$NOTES")
    [[ $PLAN == '{'* ]] || { PROBLEM=${PROBLEM:-launch_multi_gpu.sh: the trainer gave no plan} && return 1; }
}

plan_value() { "$PYTHON" -c 'import json, sys; print(json.loads(sys.argv[1])[sys.argv[2]])' "$PLAN" "$1"; }

show_plan() {
    say '' "${BOLD}The plan$PLAIN"
    "$PYTHON" -c 'import json, sys
plan = json.loads(sys.argv[1])
scaled = "{lr_rule} rule, from {base_lr:g} at batch size {base_batch_size}"
plan["how"] = "as given" if plan["base_lr"] is None else scaled.format(**plan)
print("""\
  effective batch  {global_batch_size}: {batch_size} per device, {grad_accum_steps} accumulated, workers: {workers}
  learning rate    {learning_rate:.4g} ({how})
  length           {total_steps} steps, {steps_per_epoch} per epoch, {warmup_steps} of warm-up
  device           {device}, mixed precision {precision}
  starts           {resume}
  saves to         {save_dir}""".format(**plan))' "$PLAN" >&2
}

set_command() { # in SAVE_DIR, so that the same command goes on where it stopped, and the results are where we say
    SAVE_DIR=$(plan_value save_dir) RESUME=''
    set_flags
    COMMAND=("$PYTHON")
    [[ $MODE != ddp ]] || COMMAND=("${TORCHRUN[@]}" --standalone "--nproc_per_node=$WORKERS")
    COMMAND=(${ENVIRONMENT[@]+"${ENVIRONMENT[@]}"} "${COMMAND[@]}" "${MAIN[@]}" "${FLAGS[@]}")
}

quoted() { # WIDTH WORD...: to paste into a shell, folded with backslashes
    local word plain='^[A-Za-z0-9_./:=,+@%-]+$' line=''
    for word in "${@:2}"; do
        [[ $word =~ $plain ]] || word=$(printf %q "$word")
        ((${#line} + ${#word} < $1)) || { printf '%s \\\n' "$line" && line='   '; }
        line+=${line:+ }$word
    done
    printf '%s\n' "$line"
}

run() { # in a session of its own, so that a signal reaches the trainer once: from here
    local code trainer signal signalled=yes
    "$PYTHON" -c 'import os, signal, sys
os.setsid()
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
os.execvp("env", sys.argv)' "${COMMAND[@]}" &
    trainer=$!
    # shellcheck disable=SC2064 # the trainer is known now
    for signal in INT TERM HUP QUIT; do
        trap "signalled=yes STOPPED='was stopped'; kill -$signal $trainer || :" "$signal"
    done
    while [[ -n $signalled ]]; do # a signal ends the wait, but not yet the trainer
        signalled='' code=0
        wait "$trainer" || code=$?
    done
    return "$code"
}

tell_the_end() { # CODE: how it ended, and where the results are
    local board=tensorboard
    [[ $PYTHON != */* ]] || board=${PYTHON%/*}/tensorboard
    say ''
    (($1 == 0)) || say "${RED}Training $STOPPED (exit code $1).$PLAIN"
    (($1 == 0)) || [[ ! -d $SAVE_DIR/checkpoints ]] || say "The same command goes on from the last checkpoint."
    [[ -d $SAVE_DIR ]] || return 0
    say "${BOLD}Results$PLAIN (summary.json: the figures; best.pt: the weights)" "  $SAVE_DIR"
    say "${BOLD}TensorBoard$PLAIN (then open http://localhost:6006)" \
        "  $(quoted 99999 "$board" --logdir "$SAVE_DIR/tensorboard")"
}

parse_flags() {
    while (($# > 0)); do
        [[ $1 != --?*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
        case $1 in
            --yes | --dry-run) [[ $1 == --yes ]] && YES=1 || DRY_RUN=1; shift; continue ;;
            --help | -h) usage; exit ;;
            --) EXTRA=("${@:2}"); return ;;
            --mode) MODE=${2-} ;;
            --gpus) GPUS=${2-} ;;
            --nproc) WORKERS=${2-} ;;
            --config) RECIPE=${2-} ;;
            --data-dir) DATA_DIR=${2-} ;;
            --batch-size) BATCH=${2-} ;;
            --save-dir) SAVE_DIR=${2-} ;;
            --resume) RESUME=${2-} ;;
            *) refuse "$1 is no flag of the launcher (see --help); flags for the trainer come after --" ;;
        esac
        [[ -n ${2-} && $2 != --* ]] || refuse "$1 needs a value"
        shift 2
    done
}

main() {
    local code=0
    parse_flags "$@"
    [[ -n $YES || -t 0 && -t 2 ]] || refuse "there is no terminal to ask on; --yes takes every default, and
  --mode --gpus --nproc --config --data-dir --batch-size --save-dir --resume give other answers"
    trap 'leave 130 "" "Cancelled; nothing was started."' INT
    NOTES=$(mktemp)
    trap 'rm -f "$NOTES"' EXIT
    find_programs
    find_recipes
    detect_gpus
    obey_flags
    [[ -n $YES ]] || say "Enter takes the answer in [brackets], Ctrl-C leaves." ''
    show_machine
    settle_mode
    settle_devices
    settle_recipe
    settle_plan
    settle_resume
    settle_batch_size
    show_plan
    set_command
    [[ -z $DRY_RUN ]] || { quoted 99999 "${COMMAND[@]}"; exit; }
    say '' "${BOLD}The command$PLAIN" "$(quoted 77 "${COMMAND[@]}")" ''
    settle '' '' "Start the training?" y check_yes
    [[ $ANSWER == yes ]] || leave 130 "Not started; the command above does the same."
    run || code=$?
    tell_the_end "$code"
    exit "$code"
}

main "$@"
