#!/usr/bin/env bash
# A run on 1 to N machines under Slurm: sbatch --nodes 4 docs/cluster/slurm.sh recipes/llama_7b.yaml [flags]
# Submit it in the repository, which all machines share.
#SBATCH --job-name=hope
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
# SIGTERM to all machines two minutes before the time limit: the run writes a checkpoint and ends.
#SBATCH --signal=TERM@120
# The same script starts again after a machine was lost, and continues from the newest checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.txt
set -u

export NODES=$SLURM_JOB_NUM_NODES
export GPUS=${SLURM_GPUS_ON_NODE:-8}
HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export HEAD
# A port for each job, in case two jobs share a machine.
export PORT=$((20000 + SLURM_JOB_ID % 10000))
# On storage that all machines share. The name stays the same when the job is started again.
export RUN=${RUN:-$PWD/runs/$(basename "${1%.*}")}
# The cluster's fast network, if NCCL does not find it: see NCCL_DEBUG's lines in the log.
# export NCCL_SOCKET_IFNAME=ib0 NCCL_IB_HCA=mlx5

# One task per machine. If a machine fails, all end, and Slurm starts the job again.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 bash -c 'NODE=$SLURM_NODEID exec bash docs/cluster/node.sh "$@"' node "$@"
status=$?

# 75: the time is over and the run is not complete. Another status is a mistake, which a new start would repeat.
if [ "$status" -eq 75 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
