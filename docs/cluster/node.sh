#!/usr/bin/env bash
# The script of one machine of several: joins the others, and starts again until the run is complete.
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
# The script ends after this many starts in a row without a new checkpoint.
STARTS=${STARTS:-5}
# Pause between two starts, in which the other launchers end and the first machine's store with them.
PAUSE_SECONDS=${PAUSE_SECONDS:-10}
# How long a start waits for machines that have not started yet or are lost.
MEET_SECONDS=${MEET_SECONDS:-600}

# Writes the last collectives of every rank beside the run when a collective waits longer than --ddp_timeout.
export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-20000}
export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-$RUN/collectives_rank}
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
# A process whose collective failed ends and does not wait. This is torch's default, which an image may change.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
# The log names the network and the rings that NCCL chose, once.
export NCCL_DEBUG=${NCCL_DEBUG:-INFO} NCCL_DEBUG_SUBSYS=${NCCL_DEBUG_SUBSYS:-INIT,NET}
# Seconds for a checkpoint after SIGTERM; must be below the scheduler's grace time.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

is_complete() {
  grep -qs '"complete": true' "$RUN/run.json"
}

newest_checkpoint() {
  find "$RUN" -maxdepth 1 -name 'checkpoint-*' | sort -V | tail -n 1
}

# The first machine holds the store; without this, any machine that resolves HEAD to itself would.
is_host=$([ "$NODE" -eq 0 ] && echo true || echo false)
launcher= stopping=
# A shell does not pass signals on by itself.
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
  # The signal ended the wait, not the launcher.
  while kill -0 "$launcher" 2>/dev/null; do
    wait "$launcher"
    status=$?
  done
  is_complete && exit 0
  # The scheduler stops this machine: status 75 asks it to start the run again.
  [ -z "$stopping" ] || exit 75
  [ "$(newest_checkpoint)" = "$before" ] || starts=0
  echo "node $NODE: the launcher ended with status $status, and the run is not complete: starting again" >&2
  sleep "$PAUSE_SECONDS" &
  wait $!
  [ -z "$stopping" ] || exit 75
done
