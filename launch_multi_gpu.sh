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
#   --data-dir PATH        folder or file that holds the dataset
#   --batch-size N         samples per device and micro-batch, or auto
#   --save-dir DIR         folder of the run (default: the trainer names one)
#   --resume auto|never    continue a run that is there, or start afresh
#   --yes                  take the default of every question
#   --dry-run              show the command, after trying a batch
#   --help                 show this
#
# Examples:
#   bash launch_multi_gpu.sh --yes -- --epochs 5
#   bash launch_multi_gpu.sh --gpus 0,1 --config har --data-dir data/har
#
# Exit codes: the trainer's; 2 for a wrong request; 130 when you cancel.

# shellcheck disable=SC2329 # the checks are called by name
#
# Rules of this file: commands are arrays and user input is never evaluated; every number of the plan comes from the
# trainer's own --dry-run --json; questions go to stderr, stdout is the trainer's; bash 3.2 is enough;
# names are in lower case, so that an exported DATA_DIR reaches the trainer unchanged.
set -euo pipefail
shopt -s nocasematch # DDP is ddp

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mode='' gpus='' nproc='' config='' data_dir='' batch_size='' save_dir='' resume='' # answers, empty until asked or given
yes='' dry_run='' extra=()
gpu_id=() gpu_row=() gpu_free=() gpu_state=() no_gpu='' cores=1 # the machine, one entry per GPU
recipes=() recipe_text=()
answer='' why='' choices=() # a check sets the answer, or why there is none
plan='' plan_code=0 folder='' start='' size='' problem='' notes='' environment=() flags=() command=()
dp_ids='' first_name='' goes_on='' begins='' name_width=14 stopped=ended bold='' dim='' red='' plain=''
columns=$(tput cols 2>/dev/null) || columns=80
[[ ! -t 2 || -n ${NO_COLOR-} || ${TERM:-dumb} == dumb ]] ||
    bold=$'\033[1m' dim=$'\033[2m' red=$'\033[31m' plain=$'\033[0m'

say() { printf '%s\n' "$@" >&2 || :; } # a closed terminal must not hide the trainer's exit code
leave() { say "${@:2}" && exit "$1"; }
refuse() { leave 2 "launch_multi_gpu.sh: $1"; }
usage() { sed -n '2,/^$/ s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }
joined() { (IFS=, && printf '%s' "$*"); }
count_of() { tr ',' '\n' <<<"$1" | grep -c .; } # of a list with commas
counted() { printf '%s %s' "$1" "$2$( (($1 == 1)) || printf s)"; }

show_choice() { # NUMBER NAME TEXT: one entry of a menu, folded to the terminal
    local indent
    indent=$(printf '%*s' $((name_width + 6)) '')
    printf "  $bold%2d  %-*s$plain%s\n" "$1" "$name_width" "$2" \
        "$(fold -s -w $((columns > 60 ? columns - name_width - 7 : 40)) <<<"$3" | sed "2,\$ s/^/$indent/")" >&2
}

ask() { # NAME QUESTION DEFAULT CHECK: ask for the variable of that name, unless a flag has set it
    local line flag=--${1//_/-} given=${!1}
    if [[ -n $given$yes ]]; then
        "$4" "${given:-$3}" || refuse "$flag ${given:-$3}: $why"
    else
        while :; do
            printf '%s' "$bold$2$plain${3:+ [$3]}: " >&2
            read -r line || leave 2 '' "launch_multi_gpu.sh: the input ended at \"$2\"; nothing was started."
            "$4" "${line:-$3}" && break
            [[ -z $why ]] || say "  $red$why$plain"
        done
    fi
    printf -v "$1" %s "$answer"
}

# --- Checks of answers -----------------------------------------------------------------------------------------------

check_number() {
    local whole='^[1-9][0-9]{0,8}$'
    why="a whole number from 1 up is needed"
    [[ $1 =~ $whole ]] && answer=$1
}

check_batch_size() {
    [[ $1 != m || -z $plan ]] || { measure_memory && why='' && return 1; }
    if [[ $1 == auto ]]; then answer=auto; else check_number "$1"; fi
}

check_choice() { # by name or by its number in choices
    local i
    for ((i = 0; i < ${#choices[@]}; i++)); do
        [[ $1 == "$((i + 1))" || $1 == "${choices[i]}" ]] && answer=${choices[i]} && return
    done
    why="answer 1 to ${#choices[@]}, or one of: $(joined "${choices[@]}" | sed 's/,/, /g')"
    return 1
}

check_yes() {
    why="answer y or n"
    case $1 in y | yes) answer=yes ;; n | no) answer=no ;; *) return 1 ;; esac
}

check_resume() { choices=(auto never) && check_choice "$1"; }

check_mode() { # by name, and against the machine, --gpus and --nproc
    choices=(ddp dp single)
    check_choice "$1" || return
    if [[ $answer == dp ]]; then
        why="dp needs two GPUs or more; usable here: ${#gpu_id[@]}${nproc:+, asked for: $nproc}"
        ((${#gpu_id[@]} > 1 && ${nproc:-2} > 1))
    elif [[ $answer == single ]]; then
        why="single uses one device; asked for: ${nproc:-1}"
        ((${nproc:-1} == 1))
    fi
}

check_workers() {
    check_number "$1" || return
    why="there are $(counted ${#gpu_id[@]} GPU) to use, and each takes one worker"
    ((${#gpu_id[@]} == 0 || $1 <= ${#gpu_id[@]})) || return 1
    why="dp needs two GPUs or more"
    [[ $mode != dp || $1 -gt 1 ]]
}

check_gpus() { # "0,1", "0 1" or "all": GPUs that exist, each once, as many as --nproc says
    local list=$1 all gpu picked=, shape='^[0-9]+([ ,]+[0-9]+)*$'
    all=$(joined "${gpu_id[@]}")
    [[ $list == all ]] && list=$all
    why="numbers with commas between them are needed, such as 0,1"
    [[ $list =~ $shape ]] || return 1
    for gpu in ${list//,/ }; do
        why="there is no GPU $gpu to use here; there are $all"
        [[ ,$all, == *,$gpu,* ]] || return 1
        why="GPU $gpu is named twice"
        [[ $picked != *,$gpu,* ]] || return 1
        picked+=$gpu,
    done
    answer=${picked#,} answer=${answer%,}
    why="name $nproc of $all"
    [[ -z $nproc || $(count_of "$answer") == "$nproc" ]]
}

check_recipe() { # a number or name of the menu, or a YAML file
    why="there is no such file"
    if [[ $1 == */* || $1 == *.y*ml ]]; then
        [[ -f $1 ]] && answer=$1
    else
        choices=(${recipes[@]+"${recipes[@]}"}) && check_choice "${1//-/_}"
    fi
}

check_data() {
    answer=${1/#\~\//${HOME-}/}
    why="there is no such file or folder"
    [[ -e $answer ]]
}

# --- The machine -----------------------------------------------------------------------------------------------------

find_programs() { # of the project's own environment if it exists; after `pip install` all is beside this script
    local beside=$root/
    [[ $root -ef $PWD ]] && beside=''
    python=python3 main=("${beside}main_multi_gpu.py")
    if [[ -x $root/.venv/bin/python ]]; then
        python=$beside.venv/bin/python
    elif [[ ! -f $root/main_multi_gpu.py && -x $root/python ]]; then
        python=$root/python main=(-m main_multi_gpu)
    fi
    command -v "$python" >/dev/null || refuse "python3 is not on the PATH; install it, then run: make quickstart"
    [[ ${main[0]} == -m || -f ${main[0]} ]] || refuse "main_multi_gpu.py is not beside this script, in $root"
    torchrun=(torchrun)
    [[ $python != */* ]] || torchrun=("${python%/*}/torchrun")
    command -v "${torchrun[0]}" >/dev/null || torchrun=("$python" -m torch.distributed.run)
}

find_recipes() { # the trainer's list
    local name text list
    list=$("$python" "${main[@]}" recipes 2>/dev/null) ||
        refuse "$python ${main[*]} does not run; make quickstart installs what it needs"
    while read -r name text; do
        recipes+=("$name") && recipe_text+=("${text%%;*}")
    done <<<"$list"
}

detect_gpus() { # set gpu_*, or no_gpu to why none can be used
    local visible=${CUDA_VISIBLE_DEVICES-all} numbers='^[0-9]+(,[0-9]+)*$' found id name total free load limit=()
    cores=$(OMP_NUM_THREADS='' nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    [[ $gpus != none ]] || { no_gpu="--gpus none" gpus='' environment=(CUDA_VISIBLE_DEVICES=) && return; }
    [[ -n $visible && $visible != -1 ]] || { no_gpu="CUDA_VISIBLE_DEVICES hides them" && return; }
    [[ $visible == all || $visible =~ $numbers ]] ||
        refuse "CUDA_VISIBLE_DEVICES=$visible: this launcher needs GPU numbers; set numbers, or unset it"
    command -v nvidia-smi >/dev/null || { no_gpu="no nvidia-smi" && return; }
    ! command -v timeout >/dev/null || limit=(timeout 30) # a faulty driver can hang it
    found=$(${limit[@]+"${limit[@]}"} nvidia-smi --format=csv,noheader,nounits \
        --query-gpu=index,name,memory.total,memory.free,utilization.gpu 2>&1) ||
        { no_gpu="nvidia-smi failed: ${found%%$'\n'*}" && return; }
    while IFS=, read -r id name total free load; do
        [[ $id =~ ^[0-9]+$ && ($visible == all || ,$visible, == *,$id,*) ]] || continue
        add_gpu "$id" "${name# }" "${total# }" "${free# }" "${load# }"
    done <<<"$found"
    ((${#gpu_id[@]} > 0)) || no_gpu="nvidia-smi lists none"
}

add_gpu() { # ID NAME TOTAL FREE LOAD: memory in MiB, load in percent; "[N/A]" counts as unused
    local total=${3//[!0-9]/} free=${4//[!0-9]/} load=${5//[!0-9]/} state=idle room='?'
    [[ -z $total || -z $free ]] || room="$((free / 1024)) of $((total / 1024)) GiB"
    ((${load:-0} <= 10 && (total - free <= 1024 || (total - free) * 10 <= total))) || state='in use'
    [[ $2 == "${first_name:=$2}" ]] || environment=(CUDA_DEVICE_ORDER=PCI_BUS_ID) # else CUDA counts the fastest first
    gpu_id+=("$1") gpu_free+=("${free:-0}") gpu_state+=("$state")
    gpu_row+=("$(printf '%3s  %-36.36s  %14s  %4s %%  %s' "$1" "$2" "$room" "$5" "$state")")
}

idle_count() { printf '%s\n' ${gpu_state[@]+"${gpu_state[@]}"} | grep -c '^idle$' || :; }

preferred() { # N: that many GPUs as a list, idle ones first, then those with the most free memory
    local i
    for ((i = 0; i < ${#gpu_id[@]}; i++)); do
        if [[ ${gpu_state[i]} == idle ]]; then echo "0 0 ${gpu_id[i]}"; else echo "1 ${gpu_free[i]} ${gpu_id[i]}"; fi
    done | sort -k1,1n -k2,2nr -k3,3n | sed -n "1,$1 s/.* //p" | sort -n | tr '\n' , | sed 's/,$//'
}

show_machine() {
    local there=${#gpu_id[@]}
    say "${bold}This machine: $(counted "$there" GPU) to use, $(counted "$cores" "CPU core")$plain${no_gpu:+ ($no_gpu)}"
    ((there == 0)) ||
        say "  $dim$(printf '%3s  %-36s  %14s  %6s' GPU name 'free memory' load)$plain" "${gpu_row[@]/#/  }"
}

# --- The questions ---------------------------------------------------------------------------------------------------

check_flags() { # check all given flags before the first question
    local each name
    if [[ -n $gpus ]]; then
        ((${#gpu_id[@]} > 0)) || refuse "--gpus $gpus: no GPU can be used here ($no_gpu)"
        ask gpus '' '' check_gpus
        nproc=$(count_of "$gpus")
    fi
    for each in "nproc workers" "mode mode" "config recipe" "data_dir data" "batch_size batch_size" "resume resume"; do
        name=${each% *}
        [[ -z ${!name} ]] || ask "$name" '' '' "check_${each#* }"
    done
}

ask_mode() {
    local there=${#gpu_id[@]} share best=ddp reason
    share=${nproc:-$(if ((there > 0)); then idle_count; else echo "$cores"; fi)}
    reason="$(counted "$share" "$(if ((there > 0)); then echo GPU; else echo "CPU core"; fi)") can share it"
    ((share > 1)) || best=single reason="one device is free"
    if [[ -z $mode$yes ]]; then
        say '' "${bold}How should the work be shared?$plain"
        show_choice 1 ddp "One process per device, each with the whole model; fastest."
        show_choice 2 dp "One process feeds several GPUs; slower, needs no launcher."
        show_choice 3 single "One process on one device."
        say "  Recommended here: $best ($reason)."
    fi
    ask mode Mode "$best" check_mode
}

ask_devices() { # how many, and which
    local there=${#gpu_id[@]} default=2 what="CPU processes" i
    ((there == 0)) || default=$(idle_count) what=GPUs
    ((default > 1)) || default=$([[ $mode == dp ]] && echo 2 || echo 1)
    [[ $mode != single ]] || nproc=1
    ask nproc "How many $what" "$default" check_workers
    ((there > 0)) || return 0
    ((there > nproc)) || gpus=all
    ask gpus "Which of them" "$(preferred "$nproc")" check_gpus
    for ((i = 0; i < there; i++)); do
        [[ ${gpu_state[i]} == idle || ,$gpus, != *,${gpu_id[i]},* ]] ||
            say "  Note: GPU ${gpu_id[i]} is in use by others."
    done
    # --gpu-ids counts within a CUDA_VISIBLE_DEVICES that the user has set: narrow it, then count from 0.
    dp_ids=$gpus
    [[ -z ${CUDA_VISIBLE_DEVICES-} ]] || dp_ids=$(seq -s, 0 $((nproc - 1)))
    [[ $mode == dp && $dp_ids == "$gpus" ]] || environment+=("CUDA_VISIBLE_DEVICES=$gpus")
}

names_dataset() { # whether the data itself shows which dataset it is: a table, images in folders, ...
    local named='(^| )--data(-dir)?[ =]'
    [[ -n $data_dir || "${extra[*]-}" =~ $named ]] || return 1
    trainer ${data_dir:+--data-dir "$data_dir"} ${extra[@]+"${extra[@]}"} --print-config >/dev/null 2>&1
}

ask_recipe() {
    local i default=${recipes[0]-}
    [[ -n $config || -n $default ]] || return 0
    [[ -n $config ]] || ! names_dataset || return 0
    [[ -n $config$yes ]] || say '' "${bold}What to train?$plain"
    for ((i = 0; i < ${#recipes[@]}; i++)); do
        ((${#recipes[i]} + 2 <= name_width)) || name_width=$((${#recipes[i]} + 2))
    done
    for ((i = 0; i < ${#recipes[@]}; i++)); do
        [[ ${recipes[i]} != digits ]] || default=digits
        [[ -n $config$yes ]] || show_choice $((i + 1)) "${recipes[i]}" "${recipe_text[i]}"
    done
    ask config Recipe "$default" check_recipe
}

ask_plan() { # ask the trainer for the plan, and the user for missing settings
    until make_plan; do
        say "$problem"
        if [[ $problem == *--data-dir* && -z $yes ]]; then
            data_dir='' && ask data_dir "Folder or file that holds the dataset" '' check_data
        elif [[ $problem == *--batch-size* && -z $yes ]]; then
            batch_size='' && ask batch_size "Batch size per device" '' check_batch_size
        else
            exit "$plan_code"
        fi
    done
}

ask_resume() { # only if the run folder has a run
    [[ -z $resume$yes && -e $folder/config.yaml ]] || return 0
    say '' "There is a run in $folder" "  (it $start)"
    ask goes_on "Continue it? (n starts a new run in a new folder)" y check_yes
    [[ $goes_on == yes ]] || { resume=never save_dir='' && ask_plan; }
}

ask_batch_size() { # a run that is continued keeps its own
    [[ -z $batch_size && $goes_on != yes ]] || return 0
    ask batch_size "Batch size per device, or m: measure its memory" "$size" check_batch_size
    [[ $batch_size != "$size" ]] || { batch_size='' && return; }
    ask_plan
    ask_resume
}

# --- The plan and the command ----------------------------------------------------------------------------------------

set_flags() { # the same for the plan and for the run
    case $mode in
        ddp) flags=(--multi-gpu ddp) ;;
        dp) flags=(--multi-gpu dp --gpu-ids "$dp_ids") ;;
        single) flags=(--multi-gpu none) ;;
    esac
    [[ -z $config ]] || flags+=(--config "$config")
    [[ -z $data_dir ]] || flags+=(--data-dir "$data_dir")
    [[ -z $batch_size ]] || flags+=(--batch-size "$batch_size")
    [[ -z $save_dir ]] || flags+=(--save-dir "$save_dir")
    [[ -z $resume ]] || flags+=(--resume "$resume")
    flags+=(${extra[@]+"${extra[@]}"})
}

trainer() { env ${environment[@]+"${environment[@]}"} "$python" "${main[@]}" "$@"; }
show_wait() { [[ ! -t 2 ]] || printf '%s' "$dim$1$plain" >&2; }
clear_line() { [[ ! -t 2 ]] || printf '\r%*s\r' $((columns - 1)) '' >&2; }

make_plan() { # set plan to the trainer's, or problem to its error
    local processes=()
    plan_code=2
    set_flags
    [[ $mode != ddp ]] || processes=(--nproc-per-node "$nproc")
    show_wait "The trainer computes the plan..."
    plan=$(trainer "${flags[@]}" ${processes[@]+"${processes[@]}"} --dry-run --json 2>"$notes") ||
        { plan_code=$? plan=''; }
    clear_line
    problem=$(cat "$notes")
    [[ $plan == '{'* ]] || { problem=${problem:-launch_multi_gpu.sh: the trainer printed no plan} && return 1; }
    read_plan
}

read_plan() { # set what the questions need, and plan to its text
    local layout='import json, sys
plan = json.loads(sys.argv[1])
scaled = "{lr_rule} rule, from {base_lr:g} at batch size {base_batch_size}"
plan["how"] = "as given" if plan["base_lr"] is None else scaled.format(**plan)
print("""\
{save_dir}
{resume}
{batch_size}
  effective batch  {global_batch_size}: {batch_size} per device, {grad_accum_steps} accumulated, workers: {workers}
  learning rate    {learning_rate:.4g} ({how})
  length           {total_steps} steps, {steps_per_epoch} per epoch, {warmup_steps} of warm-up
  device           {device}, mixed precision {precision}
  starts           {resume}
  saves to         {save_dir}""".format(**plan))'
    { read -r folder && read -r start && read -r size && plan=$(cat); } < <("$python" -c "$layout" "$plan")
}

measure_memory() { # of one device: show the result of `plan`, after a few real steps
    local found
    show_wait "Measuring a few steps, for some seconds..."
    found=$(trainer plan "${flags[@]}" --workers 1 --interconnect pcie4 2>"$notes") || found=$(cat "$notes")
    clear_line
    grep -E '^(memory|error:|  try:| +of .* would hold)' <<<"$found" | fold -s -w $((columns - 3)) | sed 's/^/  /' >&2
}

set_command() { # with save_dir, so that the same command continues the run, in the folder that we show
    save_dir=$folder resume=''
    set_flags
    command=("$python")
    [[ $mode != ddp ]] || command=("${torchrun[@]}" --standalone "--nproc_per_node=$nproc")
    command=(${environment[@]+"${environment[@]}"} "${command[@]}" "${main[@]}" "${flags[@]}")
}

quoted() { # WIDTH WORD...: to paste into a shell, folded with backslashes
    local word safe='^[A-Za-z0-9_./:=,+@%-]+$' line=''
    for word in "${@:2}"; do
        [[ $word =~ $safe ]] || word=$(printf %q "$word")
        ((${#line} + ${#word} < $1)) || { printf '%s \\\n' "$line" && line='   '; }
        line+=${line:+ }$word
    done
    printf '%s\n' "$line"
}

run() { # in its own session, so that a signal reaches the trainer only once: from here
    local code trainer signal signalled=yes
    "$python" -c 'import os, signal, sys
os.setsid()
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
os.execvp("env", sys.argv)' "${command[@]}" &
    trainer=$!
    # shellcheck disable=SC2064 # the process id is known now
    for signal in INT TERM HUP QUIT; do
        trap "signalled=yes stopped='was stopped'; kill -$signal $trainer || :" "$signal"
    done
    while [[ -n $signalled ]]; do # a signal ends the wait before the trainer ends
        signalled='' code=0
        wait "$trainer" || code=$?
    done
    return "$code"
}

report_end() { # CODE: show how the run ended, and where the results are
    local board=tensorboard
    [[ $python != */* ]] || board=${python%/*}/tensorboard
    say ''
    (($1 == 0)) || say "${red}Training $stopped (exit code $1).$plain"
    (($1 == 0)) || [[ ! -d $save_dir/checkpoints ]] || say "The same command continues from the last checkpoint."
    [[ -d $save_dir ]] || return 0
    say "${bold}Results$plain (summary.json: the figures; best.pt: the weights)" "  $save_dir"
    say "${bold}TensorBoard$plain (then open http://localhost:6006)" \
        "  $(quoted 99999 "$board" --logdir "$save_dir/tensorboard")"
}

parse_trainer_flags() { # all that the launcher asks for nothing about; the folder of the run is its own question
    while (($# > 0)); do
        case $1 in
            --save-dir=*) save_dir=${1#*=} ;;
            --save-dir) [[ -n ${2-} ]] || refuse "$1 needs a value"; save_dir=$2; shift ;;
            *) extra+=("$1") ;;
        esac
        shift
    done
}

parse_flags() {
    local name
    while (($# > 0)); do
        [[ $1 != --?*=* ]] || set -- "${1%%=*}" "${1#*=}" "${@:2}"
        case $1 in
            --yes | --dry-run) [[ $1 == --yes ]] && yes=1 || dry_run=1; shift; continue ;;
            --help | -h) usage; exit ;;
            --) shift && parse_trainer_flags "$@"; return ;;
            --mode | --gpus | --nproc | --config | --data-dir | --batch-size | --save-dir | --resume) name=${1#--} ;;
            *) refuse "$1 is no flag of the launcher (see --help); flags for the trainer come after --" ;;
        esac
        [[ -n ${2-} && $2 != --* ]] || refuse "$1 needs a value"
        printf -v "${name//-/_}" %s "$2"
        shift 2
    done
}

main() {
    local code=0
    parse_flags "$@"
    [[ -n $yes || -t 0 && -t 2 ]] || refuse "there is no terminal to ask on; --yes takes every default, and
  --mode --gpus --nproc --config --data-dir --batch-size --save-dir --resume give other answers"
    trap 'leave 130 "" "Cancelled; nothing was started."' INT
    notes=$(mktemp)
    trap 'rm -f "$notes"' EXIT
    find_programs
    find_recipes
    detect_gpus
    check_flags
    [[ -n $yes ]] || say "Enter takes the answer in [brackets], Ctrl-C leaves." ''
    show_machine
    ask_mode
    ask_devices
    ask_recipe
    ask_plan
    ask_resume
    ask_batch_size
    [[ -n $yes && -z $dry_run ]] || say '' "${bold}The plan$plain" "$plan" # with --yes the trainer's own is enough
    set_command
    [[ -z $dry_run ]] || { quoted 99999 "${command[@]}"; exit; }
    say '' "${bold}The command$plain" "$(quoted 77 "${command[@]}")" ''
    ask begins "Start the training?" y check_yes
    [[ $begins == yes ]] || leave 130 "Not started; the command above does the same."
    run || code=$?
    report_end "$code"
    exit "$code"
}

main "$@"
