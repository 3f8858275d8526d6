#!/usr/bin/env bash
# A Slurm cluster of many node names on this one machine, for tests: munged, slurmctld and one slurmd a node, without
# systemd, all below one folder.
#
#   slurm-lab.sh start FOLDER NODES [GPUS]   NODES is how many
#   slurm-lab.sh stop  FOLDER
#   slurm-lab.sh guard FOLDER                stops it and deletes the folder when standard input ends: when whoever holds the
#                                            other end closes it, or is killed
#   slurm-lab.sh env   FOLDER                variables with which squeue, scontrol and the others find it
#
# EXTRA may hold further lines of slurm.conf. A folder may hold its own topology.conf before `start`; without one, leaves of LEAF nodes (default 4) and, above them,
# spines of SPINE leaves (default 4) and one root are written.
# Needs Debian's slurmctld, slurmd, slurm-client and munge, installed, or unpacked where VMOVE_SLURM points.
set -euo pipefail

SLURM=${VMOVE_SLURM:-}
# The first of NODES + 1 ports.
PORTS=${PORTS:-20000}
LEAF=${LEAF:-4}
SPINE=${SPINE:-4}
if [ -n "$SLURM" ]; then
    lib=$SLURM/usr/lib/x86_64-linux-gnu
    export LD_LIBRARY_PATH=$lib:$lib/slurm-wlm${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
PLUGINS=$SLURM/usr/lib/x86_64-linux-gnu/slurm-wlm
export PATH=$SLURM/usr/bin:$SLURM/usr/sbin:$PATH

die() {
    echo "slurm-lab: $*" >&2
    exit 1
}

# The programs' names in Debian end in -wlm; /etc/alternatives links them without.
program() { command -v "$1-wlm" || command -v "$1" || die "$1 is missing: apt-get install slurm-wlm, or ./run setup"; }

# daemon FOLDER NAME: the program under its own name, by a link. Plugins look by what name they were started: with another one, slurmctld runs no
# PrologSlurmctld.
daemon() {
    mkdir -p "$1/bin"
    ln -sfn "$(program "$2")" "$1/bin/$2"
    echo "$1/bin/$2"
}

write_topology() {
    local folder=$1 nodes=$2 leaf=0 spine first last
    [ -e "$folder/topology.conf" ] && return
    for ((first = 0; first < nodes; first += LEAF)); do
        last=$((first + LEAF - 1))
        [ $last -lt "$nodes" ] || last=$((nodes - 1))
        echo "SwitchName=leaf$leaf Nodes=n[$first-$last]"
        leaf=$((leaf + 1))
    done >"$folder/topology.conf"
    spine=0
    for ((first = 0; first < leaf; first += SPINE)); do
        last=$((first + SPINE - 1))
        [ $last -lt $leaf ] || last=$((leaf - 1))
        echo "SwitchName=spine$spine Switches=leaf[$first-$last]"
        spine=$((spine + 1))
    done >>"$folder/topology.conf"
    [ $spine -lt 2 ] || echo "SwitchName=root Switches=spine[0-$((spine - 1))]" >>"$folder/topology.conf"
}

write_conf() {
    local folder=$1 nodes=$2 gpus=$3 base=$4
    cat >"$folder/slurm.conf" <<CONF
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$base
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.sock
CredType=cred/munge
PluginDir=$PLUGINS
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
TopologyPlugin=topology/tree
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=1000,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
SlurmdTimeout=300
KillWait=1
MessageTimeout=30
CommunicationParameters=NoAddrCache
${EXTRA:-}
CONF
    for ((i = 0; i < nodes; i++)); do
        echo "NodeName=n$i NodeHostname=localhost NodeAddr=127.0.0.1 Port=$((base + 1 + i)) CPUs=8 RealMemory=65536 State=UNKNOWN"
    done >>"$folder/slurm.conf"
    echo "PartitionName=all Nodes=n[0-$((nodes - 1))] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO" >>"$folder/slurm.conf"
}

start() {
    local folder=$1 nodes=$2 gpus=${3:-8} base i
    command -v munged >/dev/null || die "munged is missing: apt-get install munge, or ./run setup"
    mkdir -p "$folder"/{state,spool}
    chmod 755 "$folder"
    head -c 1024 /dev/urandom >"$folder/munge.key"
    chmod 600 "$folder/munge.key"
    munged --force --socket="$folder/munge.sock" --key-file="$folder/munge.key" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" --num-threads=2
    base=$PORTS
    write_topology "$folder" "$nodes"
    write_conf "$folder" "$nodes" "$gpus" "$base"
    export SLURM_CONF=$folder/slurm.conf
    "$(daemon "$folder" slurmctld)" -f "$SLURM_CONF"
    for ((i = 0; i < nodes; i++)); do
        mkdir -p "$folder/spool/n$i"
        "$(daemon "$folder" slurmd)" -f "$SLURM_CONF" -d "$(program slurmstepd)" -N "n$i" || die "slurmd n$i did not start; see $folder/slurmd-n$i.log"
    done
    for ((i = 0; i < 1200; i++)); do
        if [ "$(timeout 20 sinfo -h -t idle -o %D 2>/dev/null | awk '{s += $1} END {print s + 0}')" = "$nodes" ]; then
            # Debian's slurmctld 22.05.8 takes no Gres= from NodeName lines, but from here it does.
            # A node that registers after that is drained, since its slurmd tells of none; slurmctld asks those behind the first 50 once more.
            [ "$gpus" = 0 ] || [ "$nodes" -le 50 ] || sleep 5
            [ "$gpus" = 0 ] || scontrol update "nodename=n[0-$((nodes - 1))]" "gres=gpu:$gpus"
            return 0
        fi
        kill -0 "$(cat "$folder/slurmctld.pid" 2>/dev/null || echo $$)" 2>/dev/null || break
        sleep 0.1
    done
    timeout 20 sinfo -N >&2 || true
    tail -5 "$folder/slurmctld.log" >&2 || true
    die "not all of $nodes nodes became idle"
}

# Processes of the cluster in a folder, by what names the folder: their command line, environment, or an open file.
# slurmstepd has no pid file, and jobs have left their parents.
belonging() {
    local folder=$1 dir pid
    for dir in /proc/[0-9]*; do
        pid=${dir#/proc/}
        case " $$ $PPID $BASHPID " in *" $pid "*) continue ;; esac
        if tr '\0' '\n' 2>/dev/null <"$dir/environ" | grep -qxF "SLURM_CONF=$folder/slurm.conf" ||
            { tr '\0' ' ' <"$dir/cmdline" | grep -v -e slurm-lab.sh | grep -qF -- "$folder/"; } 2>/dev/null ||
            find "$dir/fd" "$dir/cwd" -maxdepth 1 -lname "$folder/*" -print -quit 2>/dev/null | grep -q .; then
            echo "$pid"
        fi
    done
}

# Ends exactly the processes of the cluster in the folder.
stop() {
    local folder=$1 file pid pids=()
    for file in "$folder"/slurmd-*.pid "$folder"/slurmctld.pid "$folder"/munged.pid; do
        [ -e "$file" ] || continue
        pid=$(cat "$file" 2>/dev/null) || continue
        # A pid may have been given to somebody else.
        if grep -qa -e slurm -e munged "/proc/$pid/cmdline" 2>/dev/null; then
            kill "$pid" 2>/dev/null && pids+=("$pid")
        fi
    done
    for pid in "${pids[@]}"; do
        for _ in $(seq 100); do
            [ -e "/proc/$pid" ] || break
            sleep 0.05
        done
    done
    # Whatever is left: daemons that hang, or were only just starting, slurmstepds, their jobs.
    for _ in $(seq 20); do
        mapfile -t pids < <(belonging "$folder")
        [ ${#pids[@]} -gt 0 ] || return 0
        kill -9 "${pids[@]}" 2>/dev/null || true
        sleep 0.1
    done
}

# Outlives whoever started it, even if that is killed: standard input ends then.
guard() {
    trap '' HUP INT TERM
    cat >/dev/null
    stop "$1"
    rm -rf "$1"
}

case ${1:-} in
    start) shift && start "$@" ;;
    stop) stop "$2" ;;
    guard) guard "$2" ;;
    env)
        echo "export SLURM_CONF='$2/slurm.conf' PATH='$PATH'"
        [ -z "${LD_LIBRARY_PATH:-}" ] || echo "export LD_LIBRARY_PATH='$LD_LIBRARY_PATH'"
        ;;
    *) die "usage: slurm-lab.sh start FOLDER NODES [GPUS] | stop FOLDER | guard FOLDER | env FOLDER" ;;
esac
