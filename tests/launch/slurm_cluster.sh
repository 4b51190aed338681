#!/usr/bin/env bash
# A real Slurm cluster on one machine, for tests: nodes n1, n2, ... with network, hostname, processes and /tmp of their own.
# Needs root, and the packages of debian_packages.txt. FOLDER is the one part of /tmp that the nodes share. Partitions: test (the
# default: n1 and n2), low and urgent (all nodes; a job of urgent takes nodes from one of low, which gets SIGUSR1 a minute before).
#
#   slurm_cluster.sh up   FOLDER NODES     starts it; SLURM_CONF=FOLDER/slurm.conf is its configuration
#   slurm_cluster.sh down FOLDER NODES     ends it, with all that runs on its nodes
set -euo pipefail

readonly NETWORK=10.78.0 BRIDGE=megarl-slurm PREFIX=megarl-n
command="$1" folder="$2" nodes="$3"

down() {
    local pid
    for file in "${folder}"/pid/*.pid; do
        if [[ -f "${file}" ]]; then kill "$(cat "${file}")" 2> /dev/null || true; fi
    done
    sleep 0.5
    for ((i = 1; i <= nodes; i++)); do
        for pid in $(ip netns pids "${PREFIX}${i}" 2> /dev/null || true); do kill -9 "${pid}" 2> /dev/null || true; done
        ip link del "${PREFIX}${i}" 2> /dev/null || true # with its other end, however long the namespace still lives
        ip netns del "${PREFIX}${i}" 2> /dev/null || true
    done
    ip link del "${BRIDGE}" 2> /dev/null || true
}

if [[ "${command}" == down ]]; then
    down
    exit
fi

mkdir -p "${folder}"/{state,spool,log,pid,gpu}
chmod 711 "${folder}"
control="$(hostname -s)"
(umask 077 && head -c 1024 /dev/urandom > "${folder}/munge.key")
down
rm -f "${folder}"/pid/*
trap '[[ $? -eq 0 ]] || down' EXIT

ip link add "${BRIDGE}" type bridge
ip addr add "${NETWORK}.254/24" dev "${BRIDGE}"
ip link set "${BRIDGE}" up
{
    echo "127.0.0.1 localhost"
    echo "${NETWORK}.254 ${control}"
    for ((i = 1; i <= nodes; i++)); do echo "${NETWORK}.${i} n${i}"; done
} > "${folder}/hosts"
printf '%s: files\n' passwd group hosts > "${folder}/nsswitch.conf" # no name server can be reached from the nodes
for ((i = 1; i <= nodes; i++)); do
    ip netns add "${PREFIX}${i}"
    ip link add "${PREFIX}${i}" type veth peer name eth0 netns "${PREFIX}${i}"
    ip link set "${PREFIX}${i}" master "${BRIDGE}" up
    ip -n "${PREFIX}${i}" addr add "${NETWORK}.${i}/24" dev eth0
    ip -n "${PREFIX}${i}" link set eth0 up
    ip -n "${PREFIX}${i}" link set lo up
    ip -n "${PREFIX}${i}" route add default via "${NETWORK}.254"
done

# Eight GPUs of each node are files that are none (/dev/null's device): Slurm counts them, nobody computes with them.
for ((i = 0; i < 8; i++)); do mknod "${folder}/gpu/gpu${i}" c 1 3; done
echo "Name=gpu File=${folder}/gpu/gpu[0-7]" > "${folder}/gres.conf"
: > "${folder}/plugstack.conf"
{
    cat << EOF
ClusterName=test
SlurmctldHost=${control}(${NETWORK}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=${folder}/munge.sock,cred_expire=5
SlurmctldPort=16917
SlurmdPort=16918
StateSaveLocation=${folder}/state
SlurmdSpoolDir=${folder}/spool/%n
SlurmctldPidFile=${folder}/pid/slurmctld.pid
SlurmdPidFile=${folder}/pid/slurmd.%n.pid
SlurmctldLogFile=${folder}/log/slurmctld.log
SlurmdLogFile=${folder}/log/slurmd.%n.log
PlugStackConfig=${folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MailProg=/bin/true
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1
SlurmdParameters=config_overrides
SlurmdTimeout=10
SlurmctldTimeout=30
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
GresTypes=gpu
EOF
    for ((i = 1; i <= nodes; i++)); do
        echo "NodeName=n${i} NodeHostname=n${i} NodeAddr=${NETWORK}.${i} CPUs=16 CoresPerSocket=16 RealMemory=20000 Gres=gpu:8"
    done
    echo "PartitionName=test Nodes=n[1-2] Default=YES DefaultTime=30"
    echo "PartitionName=low Nodes=ALL PriorityTier=1 GraceTime=60 DefaultTime=30"
    echo "PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF DefaultTime=30"
} > "${folder}/slurm.conf"

export SLURM_CONF="${folder}/slurm.conf"
munged --key-file="${folder}/munge.key" --socket="${folder}/munge.sock" --pid-file="${folder}/pid/munged.pid" \
    --log-file="${folder}/log/munged.log" --seed-file="${folder}/munge.seed"
slurmctld -c -f "${SLURM_CONF}"
for ((i = 1; i <= nodes; i++)); do
    # A file system of its own over /tmp, in which FOLDER is mounted again.
    # shellcheck disable=SC2016 # expanded there
    nsenter --net="/run/netns/${PREFIX}${i}" unshare --uts --ipc --mount --pid --fork --kill-child --mount-proc bash -c '
        set -e
        hostname "$2"
        mount --bind "$1/hosts" /etc/hosts
        mount --bind "$1/nsswitch.conf" /etc/nsswitch.conf
        mount -t tmpfs tmpfs /mnt
        mkdir /mnt/shared
        mount --bind "$1" /mnt/shared
        mount -t tmpfs tmpfs /tmp
        mkdir -p "$1"
        mount --bind /mnt/shared "$1"
        mount -t tmpfs tmpfs /dev/shm
        exec slurmd -D -N "$2" -f "$3"' slurmd "${folder}" "n${i}" "${SLURM_CONF}" \
        < /dev/null > "${folder}/log/n${i}.out" 2>&1 &
    echo $! > "${folder}/pid/n${i}.pid"
done
for ((try = 0; try < 100; try++)); do
    [[ "$(sinfo -h -p low -t idle -o %D)" != "${nodes}" ]] || exit 0
    sleep 0.2
done
echo "the nodes did not come:" >&2
sinfo -N >&2
tail -n 5 "${folder}"/log/*.out "${folder}"/log/*.log >&2
exit 1
