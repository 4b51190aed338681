#!/usr/bin/env bash
# One node's part of a Slurm job; train.sbatch starts it on all of them. The head starts Ray, waits for the others' devices and
# runs megarl; the others join it. Their messages to each other lie in FOLDER:
#
#   head   the head's address and port          stop   the run shall save and end
#   up     all devices have been there          done   megarl's exit code: all is over
#
#   node.sh FOLDER HEAD DEVICES CPU INTERFACE START_SECONDS COMMAND RECIPE [key=value...]
set -euo pipefail

readonly TRIES=3 LOSS_SECONDS=5
readonly REQUEUE=75 # megarl's exit code for: start me again

folder="$1" head="$2" devices="$3" cpu="$4" interface="$5" start_seconds="$6" command="$7" recipe="$8"
shift 8
overrides=("$@")
node="${SLURMD_NODENAME}"
launch="$(dirname "$(dirname "${BASH_SOURCE[0]}")")"
# Below Ray's worker ports (10002) and the ephemeral range, and others for each job: jobs may share a node.
first_port=$((6400 + SLURM_JOB_ID % 140 * 24))
ray_pid="" driver="" starts=0

fail() {
    echo "node.sh: ${node}: $*" >&2
    exit 2
}

# The address of this node: of the interface, or of the node's name. Problems are reported as fail does.
own_address() {
    python3 - "${interface}" "${node}" "${SLURM_JOB_NUM_NODES}" << 'EOF'
import fcntl, socket, struct, sys

interface, node, nodes = sys.argv[1:]


def fail(reason):
    sys.exit(f"node.sh: {node}: {reason}")


if interface != "none":
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, 0x8915, struct.pack("256s", interface.encode()[:15]))  # SIOCGIFADDR
        except OSError as error:
            has = ", ".join(name for _, name in socket.if_nameindex())
            fail(f"the interface {interface} has no address: {error.strerror}; there are {has}")
    print(socket.inet_ntoa(answer[20:24]))
    sys.exit()
try:
    address = socket.gethostbyname(node)
except OSError as error:
    fail(f"its name has no address: {error}; give --interface")
if address.startswith("127.") and nodes != "1":
    fail(f"its name stands for {address} here, which the other nodes cannot reach; give --interface")
print(address)
EOF
}

# Whether the recipe is valid, and made for this job's nodes and devices; and whether a job array's tasks copy their checkpoints to
# different places.
check_recipe() {
    local found url
    megarl config --command "${command}" --json "${recipe}" "${overrides[@]}" > "${folder}/config.json" \
        2> "${folder}/config.err" || {
        sed "s/^/node.sh: ${node}: /" "${folder}/config.err" >&2
        exit 2
    }
    found="$(python3 -c '
import json, sys
keys = json.load(open(sys.argv[1]))["keys"]
url = keys.get("trainer.checkpoint_url", {}).get("value") or ""  # eval has none
print(*(keys["trainer." + key]["value"] for key in ("nnodes", "n_gpus_per_node")), url)' "${folder}/config.json")"
    read -r nnodes per_node url <<< "${found}"
    [[ "${nnodes}" == "${SLURM_JOB_NUM_NODES}" ]] ||
        fail "the job has ${SLURM_JOB_NUM_NODES} nodes, and the recipe is made for trainer.nnodes=${nnodes}: submit with --nodes ${nnodes}"
    [[ "${per_node}" == "${devices}" ]] ||
        fail "the job has ${devices} devices a node, and the recipe is made for trainer.n_gpus_per_node=${per_node}: give --devices ${per_node}"
    # With one place for all a task would go on from another one's checkpoint, and remove it there.
    # shellcheck disable=SC2016 # megarl reads the variable
    [[ -z "${SLURM_ARRAY_TASK_ID:-}" || -z "${url}" || "${url%/}" == */"${SLURM_ARRAY_TASK_ID}" ]] ||
        fail "trainer.checkpoint_url=${url} is the same for all tasks of the job array: end it with the task's number, /"'${oc.env:SLURM_ARRAY_TASK_ID}'
}

stop_ray() {
    [[ -n "${ray_pid}" ]] || return 0
    kill -TERM "${ray_pid}" 2> /dev/null || true
    wait "${ray_pid}" || true
    ray_pid=""
}

ray_ended() {
    ! kill -0 "${ray_pid}" 2> /dev/null
}

answers() { # PORT...
    local port
    for port in "$@"; do
        (exec 3<> "/dev/tcp/${address}/${port}") 2> /dev/null || return 1
    done
}

# Starts Ray's head; once its servers (GCS and raylet) answer, its address is in FOLDER/head. A start that fails is tried again, on
# other ports; TRIES for all calls.
start_head() {
    local port
    while ((starts < TRIES)); do
        port=$((first_port + 8 * starts))
        starts=$((starts + 1))
        bash "${launch}/ray/start_cluster.sh" head "${address}" --port "${port}" -- "${resources[@]}" \
            --temp-dir "/tmp/megarl-ray-${SLURM_JOB_ID}" &
        ray_pid=$!
        for ((second = 0; second < start_seconds; second++)); do
            if answers "${port}" "$((port + 1))"; then
                echo "${address}:${port}" > "${folder}/head.new"
                mv "${folder}/head.new" "${folder}/head" # whole or not at all
                return 0
            fi
            ! ray_ended || break
            sleep 1
        done
        stop_ray
    done
    fail "Ray's head did not start in ${TRIES} tries"
}

# To be called in a subshell, whose process it takes: that is the one that is waited for, and ended.
wait_for_devices() { # SECONDS
    exec python3 "${launch}/ray/wait_for_devices.py" "${ray_address}" --nodes "${SLURM_JOB_NUM_NODES}" --devices "${devices}" \
        --kind "${kind}" --seconds "$1"
}

# Whether all devices are there; not, if Ray's head ends before: on a machine that stands still for seconds Ray gives a start up whose
# servers have answered.
devices_came() {
    local waiting
    wait_for_devices "${start_seconds}" &
    waiting=$!
    while kill -0 "${waiting}" 2> /dev/null; do
        if ray_ended; then
            kill -TERM "${waiting}" 2> /dev/null || true
            wait "${waiting}" || true
            return 1
        fi
        sleep 0.5
    done
    if ! wait "${waiting}"; then
        sleep 2 # it may have seen that Ray ends before Ray has ended
        ray_ended || fail "not all devices came"
        return 1
    fi
}

# Runs megarl, once; its exit code goes into FOLDER/done.
run_head() {
    local status=0 told=""
    check_recipe
    start_head
    ray_address="$(cat "${folder}/head")"
    until devices_came; do
        stop_ray
        start_head
        ray_address="$(cat "${folder}/head")"
    done
    : > "${folder}/up"
    # Unbuffered: its output is watched while it goes on.
    PYTHONUNBUFFERED=1 megarl "${command}" "${recipe}" "${overrides[@]}" "trainer.ray_address=${ray_address}" > "${folder}/train.log" 2>&1 &
    driver=$!
    while kill -0 "${driver}" 2> /dev/null; do
        ! ray_ended || fail "Ray's head has ended"
        if [[ -z "${told}" && -f "${folder}/stop" ]]; then
            told=yes
            kill -USR1 "${driver}" 2> /dev/null || true
        fi
        sleep 0.5
    done
    wait "${driver}" || status=$?
    driver=""
    # megarl may see a loss before the lost part's own script does, or Slurm.
    if ((status != 0 && status != REQUEUE && SLURM_JOB_NUM_NODES > 1)); then
        sleep "${LOSS_SECONDS}"
        (wait_for_devices 0) || fail "megarl ended with exit code ${status}, and a part of the cluster was lost"
    fi
    echo "${status}" > "${folder}/done.new"
    mv "${folder}/done.new" "${folder}/done"
    stop_ray
    rm -rf "/tmp/megarl-ray-${SLURM_JOB_ID}"
}

# Joins the head's cluster, until all is over. A head that was started again has another address: what waits for the old one is told.
run_worker() {
    local joined try=1
    for ((second = 0; second < start_seconds; second++)); do
        [[ ! -f "${folder}/head" ]] || break
        sleep 1
    done
    [[ -f "${folder}/head" ]] || fail "the head on ${head} did not start within ${start_seconds} s"
    while ((try <= TRIES)); do
        joined="$(cat "${folder}/head")"
        bash "${launch}/ray/start_cluster.sh" worker "${address}" --head "${joined}" \
            --port "$((first_port + 8 * (try - 1)))" -- "${resources[@]}" &
        ray_pid=$!
        while ! ray_ended && [[ ! -f "${folder}/done" && "$(cat "${folder}/head")" == "${joined}" ]]; do sleep 0.5; done
        if ray_ended; then sleep 2; fi # the file may be seen later than the end
        if [[ -f "${folder}/done" ]]; then
            stop_ray
            rm -rf "/tmp/megarl-ray-${SLURM_JOB_ID}"
            return 0
        fi
        [[ ! -f "${folder}/up" ]] || fail "Ray's worker has ended"
        if [[ "$(cat "${folder}/head")" == "${joined}" ]]; then try=$((try + 1)); fi
        stop_ray
    done
    fail "Ray's worker did not start in ${TRIES} tries"
}

# Without Ray megarl can do nothing any more but keep its next start waiting: the rest of it ends with this script. Slurm does not
# see to that everywhere: by linuxproc it tracks what has its parent.
stop_all() {
    [[ -z "${driver}" ]] || kill -KILL "${driver}" 2> /dev/null || true
    stop_ray
}

trap stop_all EXIT
address="$(own_address)" || exit 2
if [[ "${cpu}" == yes ]]; then
    kind=CPU resources=(--num-cpus "${devices}" --num-gpus 0)
else
    cores="${SLURM_CPUS_ON_NODE:-${devices}}"
    kind=GPU resources=(--num-cpus "$((cores > devices ? cores : devices))" --num-gpus "${devices}")
fi
if [[ "${node}" == "${head}" ]]; then run_head; else run_worker; fi
