#!/usr/bin/env bash
# A shell, or a command, on a node of a job that train.sbatch runs, in its container where it has one; Ray's commands work there.
#
#   attach.sh JOB [--logs FOLDER] [--node NODE] [-- COMMAND...]
#
#   JOB             its number; of an array's task JOB_TASK, such as 12_3
#   --logs FOLDER   as the job was given it (default: outputs/slurm)
#   --node NODE     default: the first, where megarl runs
set -euo pipefail

fail() {
    echo "attach.sh: $*" >&2
    exit 2
}

[[ $# -gt 0 && "$1" != -h && "$1" != --help ]] || {
    sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
    exit 0
}
job="$1" logs=outputs/slurm node=""
shift
while [[ $# -gt 0 && "$1" != -- ]]; do
    [[ $# -gt 1 ]] || fail "$1 needs a value"
    case "$1" in
        --logs) logs="$2" ;;
        --node) node="$2" ;;
        *) fail "unknown option '$1'" ;;
    esac
    shift 2
done
[[ "${1:-}" != -- ]] || shift

shown="$(scontrol show job -o "${job}" 2>&1)" || fail "${shown}"
[[ "${shown}" != *$'\n'* ]] || fail "job ${job} is an array: say which task, as ${job}_1"
[[ "${shown}" == *" JobState=RUNNING "* ]] || fail "job ${job} does not run: $(sed -n 's/.* \(JobState=[^ ]*\).*/\1/p' <<< "${shown}")"
starts="$(sed -n 's/.* Restarts=\([0-9]*\).*/\1/p' <<< "${shown}")"
number="$(sed -n 's/^JobId=\([0-9]*\).*/\1/p' <<< "${shown}")" # an array's task has one of its own, which srun asks for
folder="$(realpath -m "${logs}")/${number}/start-${starts:-0}"
[[ -f "${folder}/container" ]] || fail "${folder} is not the folder of its logs: give --logs"
if [[ -z "${node}" ]]; then
    node="$(scontrol show hostnames "$(sed -n 's/.* NodeList=\([^ ]*\).*/\1/p' <<< "${shown}")" | head -n 1)"
fi
options=(--jobid "${number}" --overlap --nodes 1 --ntasks 1 --nodelist "${node}")
if [[ "$(cat "${folder}/container")" == pyxis ]]; then
    options+=(--container-name "megarl-${number}:exec")
fi
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="${folder}/token"
if [[ -f "${folder}/head" ]]; then
    RAY_ADDRESS="$(cat "${folder}/head")"
    export RAY_ADDRESS
fi
if [[ $# -eq 0 ]]; then
    set -- bash -i
    options+=(--pty)
fi
exec srun "${options[@]}" "$@"
