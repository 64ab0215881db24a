#!/bin/bash
# slurm-replica.sh RUN SETTINGS…    One replica of a run on a Slurm cluster; srun starts one for each task. See slurm.md.

run=$1
shift
own=$run/replica-$SLURM_PROCID
address=$(getent ahostsv4 "$SLURMD_NODENAME" | head -n 1 | cut -d ' ' -f 1)
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}

trap 'asked=1; kill -TERM $replica 2> /dev/null' TERM INT
for attempt in {1..20}; do
    newest=$(ls -t "$run"/replica-*/run.ticket 2> /dev/null | head -n 1)
    if [ "$SLURM_PROCID$attempt" = 01 ] && [ -e "$own/run.ticket" ]; then  # the job was started again
        farflung join "$own" --first --out "$own" --listen "$address" &
    elif [ "$SLURM_PROCID" = 0 ] && [ -z "$newest" ]; then  # all begins
        farflung invite --train --name "$(basename "$run")" "$@" --out "$own" --listen "$address" > /dev/null &
    elif [ -n "$newest" ]; then
        farflung join "$newest" --out "$own" --listen "$address" &
    else
        sleep 5 &  # the first has written no ticket yet
    fi
    replica=$!
    wait $replica; code=$?
    [ -n "$asked" ] && { wait $replica; exit; }
    [ "$code" = 0 ] && [ -e "$own/summary.json" ] && exit 0
    sleep 5  # it has died, or could reach nobody
done
exit 1
