#!/usr/bin/env bash
# One machine's part of a run of several: joins the others, and begins again until the run is complete.
#   NODES=2 GPUS=8 NODE=0 HEAD=node1 RUN=/shared/runs/llama bash docs/cluster/node.sh recipes/llama_7b.yaml [flags]
# slurm.sh and kubernetes.yaml set these variables:
#   NODES, GPUS  machines, and GPUs of each
#   NODE         number of this machine, from 0
#   HEAD, PORT   the first machine's address, and a port of it that is open to the others
#   RUN          folder of the run, on storage that all machines share
#   LAUNCH_FILE, PRECISION, STARTS, PAUSE_SECONDS, MEET_SECONDS  see below
set -u
: "${NODES:?}" "${GPUS:?}" "${NODE:?}" "${HEAD:?}" "${RUN:?}"
PORT=${PORT:-29500}
LAUNCH_FILE=${LAUNCH_FILE:-accelerate_configs/multi_node_fsdp.yaml}
PRECISION=${PRECISION:-bf16}
# It gives up after so many starts in a row that left no new checkpoint.
STARTS=${STARTS:-5}
# Between two starts: the launchers of the others end, and with them the place where all met.
PAUSE_SECONDS=${PAUSE_SECONDS:-10}
# How long a start waits for machines that are not there yet, or no more.
MEET_SECONDS=${MEET_SECONDS:-600}

# The last collectives of every rank, written beside the run when one of them waits longer than --ddp_timeout.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-20000}
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$RUN/collectives_rank}
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
# A process whose collective failed ends, instead of waiting on: torch's default, which an image may have changed.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
# Names the network and the rings that NCCL chose, once, in the log.
export NCCL_DEBUG=${NCCL_DEBUG:-INFO} NCCL_DEBUG_SUBSYS=${NCCL_DEBUG_SUBSYS:-INIT,NET}
# Seconds that processes have for a checkpoint after SIGTERM; below the scheduler's own.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

is_complete() {
  grep -qs '"complete": true' "$RUN/run.json"
}

newest_checkpoint() {
  find "$RUN" -maxdepth 1 -name 'checkpoint-*' | sort -V | tail -n 1
}

# The first machine has the store where all meet; without this, whichever thinks that HEAD is its own name.
is_host=$([ "$NODE" -eq 0 ] && echo true || echo false)
launcher= stopping=
# A shell passes no signal on by itself.
trap 'stopping=1; [ -z "$launcher" ] || kill -TERM "$launcher" 2>/dev/null' TERM INT

mkdir -p "$RUN"
starts=0
while ! is_complete; do
  if [ "$starts" -eq "$STARTS" ]; then
    echo "node $NODE: gave up after $STARTS starts without a new checkpoint" >&2
    exit 1
  fi
  starts=$((starts + 1))
  before=$(newest_checkpoint)
  accelerate launch --config_file "$LAUNCH_FILE" --num_machines "$NODES" --num_processes "$((NODES * GPUS))" \
    --machine_rank "$NODE" --main_process_ip "$HEAD" --main_process_port "$PORT" \
    --rdzv_backend c10d --rdzv_conf "is_host=$is_host,join_timeout=$MEET_SECONDS,read_timeout=$MEET_SECONDS" \
    --mixed_precision "$PRECISION" run_clm.py "$@" --output_dir "$RUN" &
  launcher=$!
  wait "$launcher"
  status=$?
  # A signal has ended the waiting, not the launcher.
  while kill -0 "$launcher" 2>/dev/null; do
    wait "$launcher"
    status=$?
  done
  is_complete && exit 0
  # The scheduler wants the machine back: 75 asks it to start the run again.
  [ -z "$stopping" ] || exit 75
  [ "$(newest_checkpoint)" = "$before" ] || starts=0
  echo "node $NODE: the launcher ended with status $status, and the run is not complete: starting again" >&2
  sleep "$PAUSE_SECONDS" &
  wait $!
  [ -z "$stopping" ] || exit 75
done
