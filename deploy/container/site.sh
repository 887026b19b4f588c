#!/bin/bash
# One machine of a site, in a container or on a rented machine: starts its ranks, and starts them
# again after a crash.
#
#   site.sh HOST:PORT SITE RUN.toml TOKEN_FILE [OPTIONS of dilocox join]
#
# With one machine `dilocox join` starts the ranks itself. With several machines set on each of them:
#   NODES        number of machines
#   NODE         number of this machine, from 0
#   RANKS        ranks of each machine, mostly its number of GPUs
#   MASTER_ADDR  address of machine 0; MASTER_PORT (29600) is free there
# NODES x RANKS = replicas x stages x shards of [site].
#
# SIGTERM lets the ranks finish their rounds, and the site leaves. Give them 600 s. SIGTERM to one of
# several machines ends the site on all of them. Exit codes:
#   0    the run is over, or `dilocox leave` has ended the site: do not start it again
#   143  SIGTERM to this machine, or to another one of the site, has ended it: start it again where
#        there is room
#   else five starts in a row have failed: a person has to look

set -u
if (( $# < 4 )); then
    echo "usage: site.sh HOST:PORT SITE RUN.toml TOKEN_FILE [OPTIONS]" >&2
    exit 2
fi
coordinator=$1 site=$2 run_file=$3 token=$4
shift 4
nodes=${NODES:-1} node=${NODE:-0} ranks=${RANKS:-0}
pause=10            # seconds between two starts
most=5              # starts in a row that may fail
# Seconds after which a start counts as a good one: longer than ranks wait for the first one, which is
# 5 x network.link_timeout + network.heartbeat, 605 s by default.
long=900
if (( nodes > 1 && ranks < 1 )) || { (( nodes > 1 )) && [[ -z ${MASTER_ADDR:-} ]]; }; then
    echo "site.sh: NODES is $nodes: set RANKS and MASTER_ADDR, too" >&2
    exit 2
fi

asked=0             # whether SIGTERM has come
processes=()
terminate() {
    asked=1
    for each in "${processes[@]}"; do kill -TERM "$each" 2>/dev/null; done
}
trap terminate TERM INT

join() {
    exec dilocox join "$coordinator" --site "$site" --run-file "$run_file" --token-file "$token" "$@"
}

# Starts the ranks of this machine in the background.
start() {
    processes=()
    if (( nodes == 1 )); then
        join "$@" &
        processes+=($!)
        return
    fi
    for (( number = 0; number < ranks; number++ )); do
        RANK=$(( node * ranks + number )) WORLD_SIZE=$(( nodes * ranks )) \
            LOCAL_RANK=$number LOCAL_WORLD_SIZE=$ranks \
            MASTER_ADDR=$MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29600} join "$@" &
        processes+=($!)
    done
}

# Waits for a process, whatever signals come; its exit code is in $code.
await() {
    wait "$1"
    code=$?
    while (( code > 128 )) && kill -0 "$1" 2>/dev/null; do
        wait "$1"
        code=$?
    done
}

failed=0
while (( ! asked )); do
    began=$SECONDS worst=0
    start "$@"
    if (( asked )); then terminate; fi     # the signal came between two starts
    for each in "${processes[@]}"; do
        await "$each"
        if (( code != 0 && (worst == 0 || worst == 130) )); then worst=$code; fi
    done
    if (( worst == 0 )); then
        exit 0
    elif (( asked )); then
        break
    elif (( worst == 130 && nodes > 1 )); then
        echo "site $site was told to end on another machine"
        exit 143
    elif (( worst == 130 )); then
        exit 0      # asked to leave
    fi
    if (( SECONDS - began > long )); then failed=0; fi
    if (( ++failed == most )); then
        echo "site $site: $most starts in a row have failed; exit code $worst" >&2
        exit "$worst"
    fi
    echo "site $site starts again in $pause s; exit code $worst"
    sleep "$pause" &
    processes=($!)
    wait "$!"
done
echo "site $site was told to end here"
exit 143
