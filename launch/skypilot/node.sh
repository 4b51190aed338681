#!/usr/bin/env bash
# One node's part of a SkyPilot task, which runs it on all of them: the first node starts Ray's head, waits for the devices of the
# others and runs megarl, once; the others join it, and end when it ends. The exit code is megarl's. `megarl launch skypilot`
# writes the task. The nodes need no common folder for this: whether the head is there shows at its port.
#
#   node.sh [OPTIONS] -- COMMAND RECIPE [key=value...]
#
#   --nodes N            that the task has
#   --devices D          of each node
#   --cpu                the nodes have no GPUs: the devices are processes
#   --work-dir FOLDER    that the recipe's relative paths count from (default: this one)
#   --start-seconds N    that the nodes may take to come together (default: 600)
#
# SkyPilot ends all nodes when one fails, and starts a managed job again when one of them was lost, or ended with REQUEUE.
set -euo pipefail

# Clear of SkyPilot's own Ray (6380, dashboard 8266), below Ray's worker ports (10002) and the ephemeral range.
readonly PORT=6400 WORKER_PORT=6408 # each the first of eight
readonly LOSSES=5 # so often in a row the head's port must be silent for the head to be gone

fail() {
    echo "node.sh: node ${SKYPILOT_NODE_RANK:-?}: $*" >&2
    exit 2
}

nodes="" devices="" cpu="" work_dir=. start_seconds=600
while [[ $# -gt 0 && "$1" != -- ]]; do
    case "$1" in
        --cpu) cpu=yes && shift && continue ;;
        --nodes | --devices | --work-dir | --start-seconds) [[ $# -gt 1 ]] || fail "$1 needs a value" ;;
        *) fail "unknown option '$1' (megarl's command goes behind --)" ;;
    esac
    case "$1" in
        --nodes) nodes="$2" ;;
        --devices) devices="$2" ;;
        --work-dir) work_dir="$2" ;;
        --start-seconds) start_seconds="$2" ;;
    esac
    shift 2
done
[[ "${1:-}" == -- ]] && shift
[[ $# -gt 1 ]] || fail "expected [OPTIONS] -- COMMAND RECIPE [key=value...]"
for name in nodes devices start_seconds; do
    [[ "${!name}" =~ ^[1-9][0-9]*$ ]] || fail "--${name/_/-} must be a number, found '${!name}'"
done
[[ -n "${SKYPILOT_NODE_RANK:-}" && -n "${SKYPILOT_NODE_IPS:-}" ]] ||
    fail "SKYPILOT_NODE_RANK and SKYPILOT_NODE_IPS are not set: this runs in a task of SkyPilot's"
mapfile -t addresses <<< "${SKYPILOT_NODE_IPS}"
[[ "${#addresses[@]}" == "${nodes}" ]] || fail "the recipe is made for ${nodes} nodes, and SkyPilot gave ${#addresses[@]}: ${addresses[*]}"
if [[ -z "${cpu}" && "${SKYPILOT_NUM_GPUS_PER_NODE:-0}" -lt "${devices}" ]]; then
    fail "the recipe is made for ${devices} GPUs a node, and SkyPilot gave ${SKYPILOT_NUM_GPUS_PER_NODE:-none}"
fi
launch="$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")"
# An image has megarl on PATH; in a checkout `make install` puts it there.
if ! command -v megarl > /dev/null && [[ -x "${launch}/../.venv/bin/megarl" ]]; then export PATH="${launch}/../.venv/bin:${PATH}"; fi
command -v megarl > /dev/null || fail "no 'megarl' on PATH: ${PATH}"
mkdir -p "${work_dir}"
cd "${work_dir}"
address="${addresses[SKYPILOT_NODE_RANK]}" head="${addresses[0]}"
ray_pid="" driver="" folder=""
# Of SkyPilot's own Ray, whose task this is.
unset RAY_ADDRESS RAY_CLIENT_MODE RAY_JOB_ID RAY_RAYLET_PID
export RAY_AUTH_MODE=token # RAY_AUTH_TOKEN is one of the task's secrets
if [[ -n "${cpu}" ]]; then
    kind=CPU resources=(--num-cpus "${devices}" --num-gpus 0)
else
    cores="$(nproc)"
    kind=GPU resources=(--num-cpus "$((cores > devices ? cores : devices))" --num-gpus "${devices}")
fi

# shellcheck disable=SC2329 # the trap below calls it
stop_all() {
    [[ -z "${driver}" ]] || kill -TERM "${driver}" 2> /dev/null || true
    [[ -n "${ray_pid}" ]] || return 0
    kill -TERM "${ray_pid}" 2> /dev/null || true
    wait "${ray_pid}" || true
    ray_pid=""
    [[ -z "${folder}" ]] || rm -rf "${folder}"
}

ray_ended() {
    ! kill -0 "${ray_pid}" 2> /dev/null
}

answers() { # ADDRESS PORT...
    local port
    for port in "${@:2}"; do
        timeout 5 bash -c "exec 3<> '/dev/tcp/$1/${port}'" 2> /dev/null || return 1
    done
}

head_is_gone() {
    for ((loss = 0; loss < LOSSES; loss++)); do
        ! answers "${head}" "${PORT}" || return 1
        sleep 1
    done
}

run_head() {
    local waiting status=0
    folder="$(mktemp -d /tmp/megarl-ray-XXXXXX)"
    bash "${launch}/ray/start_cluster.sh" head "${address}" --port "${PORT}" -- "${resources[@]}" --temp-dir "${folder}" &
    ray_pid=$!
    until answers "${address}" "${PORT}" "$((PORT + 1))"; do
        ! ray_ended || fail "Ray's head did not start"
        sleep 1
    done
    python3 "${launch}/ray/wait_for_devices.py" "${address}:${PORT}" --nodes "${nodes}" --devices "${devices}" \
        --kind "${kind}" --seconds "${start_seconds}" &
    waiting=$!
    while kill -0 "${waiting}" 2> /dev/null; do
        ! ray_ended || fail "Ray's head has ended"
        sleep 0.5
    done
    wait "${waiting}" || fail "not all devices came"
    PYTHONUNBUFFERED=1 megarl "$@" "trainer.ray_address=${address}:${PORT}" &
    driver=$!
    while kill -0 "${driver}" 2> /dev/null; do
        ! ray_ended || fail "Ray's head has ended"
        sleep 0.5
    done
    wait "${driver}" || status=$?
    driver=""
    echo "node.sh: megarl ended with exit code ${status}"
    exit "${status}"
}

# Joins the head's cluster, until the head is gone: how the run ended is for the head to say.
run_worker() {
    for ((second = 0; second < start_seconds; second++)); do
        ! answers "${head}" "${PORT}" || break
        sleep 1
    done
    bash "${launch}/ray/start_cluster.sh" worker "${address}" --head "${head}:${PORT}" \
        --port "${WORKER_PORT}" -- "${resources[@]}" &
    ray_pid=$!
    while ! ray_ended; do
        ! head_is_gone || break
        sleep 1
    done
    head_is_gone || fail "Ray's worker has ended"
    echo "node.sh: node ${SKYPILOT_NODE_RANK}: the head has ended"
}

trap stop_all EXIT
trap 'exit 143' TERM # SkyPilot tells all processes of the task
if [[ "${SKYPILOT_NODE_RANK}" == 0 ]]; then run_head "$@"; else run_worker; fi
