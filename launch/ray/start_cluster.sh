#!/usr/bin/env bash
# Starts one host's part of a Ray cluster for megarl and stays in the foreground: Ctrl-C (or SIGTERM) stops this
# part, and nothing else that runs on the host. See launch/README.md.
#
#   start_cluster.sh head   ADDRESS [--port PORT] [-- RAY_OPTIONS...]
#   start_cluster.sh worker ADDRESS --head HEAD_ADDRESS:PORT [--port PORT] [-- RAY_OPTIONS...]
#
# ADDRESS: this host's own address, as the other hosts reach it. PORT (6379): the first of eight consecutive ports
# that Ray's servers on this host listen on; its workers use 10002 to 19999. RAY_OPTIONS: more for `ray start`, such as
# --num-gpus 4 (default: every GPU of the host) or, on hosts without GPUs, --num-cpus 8 (one per rank).
#
# Whoever joins must hold the head's token (~/.ray/auth_token, made by the head where there is none; or the
# variables RAY_AUTH_TOKEN_PATH, RAY_AUTH_TOKEN). RAY_AUTH_MODE=disabled opens the cluster to everybody on the network.
set -euo pipefail

readonly WAIT_SECONDS=60 # for the head to answer: hosts of one job do not start at the same moment
readonly FIRST_WORKER_PORT=10002 LAST_WORKER_PORT=19999
readonly STOP_SECONDS=40 # Ray drains a node for up to 30 s before it ends its processes

fail() {
    echo "start_cluster.sh: $*" >&2
    exit 2
}

usage() {
    sed -n '2,14s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
}

# Binds every port once. It answers two questions: is ADDRESS this host's, and is anybody on these ports already?
check_ports() { # ADDRESS FIRST_PORT COUNT
    "${python}" - "$@" <<'EOF'
import errno, socket, sys

address, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
try:
    socket.getaddrinfo(address, first)
except socket.gaierror as error:
    sys.exit(f"the address {address!r} is no host's: {error.strerror}")
for port in range(first, first + count):
    try:
        socket.create_server((address, port)).close()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            sys.exit(f"{address} is not an address of this host ({socket.gethostname()})")
        sys.exit(f"port {port} of {address}: {error.strerror}; is another Ray running here? choose another --port")
EOF
}

wait_for_head() { # ADDRESS:PORT SECONDS
    "${python}" - "$@" <<'EOF'
import socket, sys, time

address, port = sys.argv[1].rsplit(":", 1)
end = time.monotonic() + float(sys.argv[2])
while True:
    try:
        socket.create_connection((address, int(port)), timeout=2).close()
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"no Ray head answers at {sys.argv[1]} after {sys.argv[2]} s: {error}")
        time.sleep(1)
EOF
}

[[ $# -gt 0 ]] || { usage >&2; exit 2; }
[[ "$1" != -h && "$1" != --help ]] || { usage; exit 0; }
role="$1"
[[ "${role}" == head || "${role}" == worker ]] || fail "the role must be head or worker, found '${role}'"
address="${2:-}"
[[ -n "${address}" && "${address}" != -* ]] || fail "the ${role}'s own address is missing: start_cluster.sh ${role} ADDRESS"
shift 2
head="" port=6379
while [[ $# -gt 0 ]]; do
    case "$1" in
        --head | --port)
            [[ $# -gt 1 ]] || fail "$1 needs a value"
            if [[ "$1" == --head ]]; then head="$2"; else port="$2"; fi
            shift 2
            ;;
        --)
            shift
            break
            ;;
        *) fail "unknown argument '$1' (options of Ray's own go behind --)" ;;
    esac
done
readonly extra=("$@")

python="$(command -v python3)" || fail "no python3 on PATH"
command -v ray > /dev/null || fail "no 'ray' on PATH: activate the environment that megarl is installed in"
[[ "${port}" =~ ^[0-9]+$ ]] || fail "--port must be a number, found '${port}'"
# From the ephemeral range any other process may be given one of our ports first, which shows as a rare failed start.
ephemeral="$(cut -f1 /proc/sys/net/ipv4/ip_local_port_range)"
((port >= 1024 && port + 7 < ephemeral)) ||
    fail "--port ${port}: the ports ${port} to $((port + 7)) must lie between 1024 and ${ephemeral}, where ephemeral ports begin"
((port + 7 < FIRST_WORKER_PORT || port > LAST_WORKER_PORT)) ||
    fail "--port ${port}: ports ${FIRST_WORKER_PORT} to ${LAST_WORKER_PORT} are for Ray's workers"
if [[ "${role}" == worker ]]; then
    [[ "${head}" =~ ^[^:]+:[0-9]+$ ]] || fail "a worker needs --head HEAD_ADDRESS:PORT, found '${head}'"
else
    [[ -z "${head}" ]] || fail "--head is a worker's argument; the head's own address is ${address}"
fi
reason="$(check_ports "${address}" "${port}" 8 2>&1)" || fail "${reason}"
# Said explicitly: otherwise Ray 2.60's head asks for a token as soon as any earlier Ray of this user left one behind,
# while its workers and drivers, which are given an address, never send theirs.
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
if [[ "${RAY_AUTH_MODE}" == token ]] && ! ray get-auth-token > /dev/null 2>&1; then
    [[ "${role}" == head ]] || fail "no token: copy the head's ~/.ray/auth_token to this host (same path, mode 600)"
    (umask 077 && ray get-auth-token --generate > /dev/null) || fail "Ray could not make a token"
fi
if [[ "${role}" == worker ]]; then
    reason="$(wait_for_head "${head}" "${WAIT_SECONDS}" 2>&1)" || fail "${reason}"
fi

options=(
    --node-ip-address "${address}"
    --node-manager-port "$((port + 1))"
    --object-manager-port "$((port + 2))"
    --runtime-env-agent-port "$((port + 3))"
    --dashboard-agent-listen-port "$((port + 4))"
    --dashboard-agent-grpc-port "$((port + 5))"
    --metrics-export-port "$((port + 6))"
    --min-worker-port "${FIRST_WORKER_PORT}"
    --max-worker-port "${LAST_WORKER_PORT}"
    --disable-usage-stats
    --block
)
if [[ "${role}" == head ]]; then
    options+=(--head --port "${port}" --ray-client-server-port "$((port + 7))" --include-dashboard=false)
else
    options+=(--address "${head}")
fi
# Ray runs workers at nice 15, behind everything else on the host: here they are what the host is for.
export RAY_worker_niceness=0

# In the background, so that bash hears signals. Not `ray stop` at the end: it ends every Ray of the host,
# also other people's; with --block Ray ends its own processes when it is told to.
set -m # in a process group of its own
ray start "${options[@]}" "${extra[@]}" &
ray_pid=$!
set +m

# Where the head has gone before, agents of a raylet (Ray 2.60) stay for two minutes, on ports that the next cluster needs.
end_rest() {
    kill -KILL -- "-${ray_pid}" 2> /dev/null || true
}

# shellcheck disable=SC2329 # the trap below calls it
stop() {
    trap - INT TERM
    echo "start_cluster.sh: stopping the ${role} at ${address}" >&2
    kill -TERM "${ray_pid}" 2> /dev/null || true
    for ((second = 0; second < STOP_SECONDS; second++)); do
        kill -0 "${ray_pid}" 2> /dev/null || { end_rest; exit 0; }
        sleep 1
    done
    end_rest
    exit 1
}
trap stop INT TERM

status=0
wait "${ray_pid}" || status=$?
end_rest
fail "Ray's ${role} at ${address} has ended by itself (exit status ${status}); its logs: session_latest/logs in Ray's temporary folder, /tmp/ray"
