#!/bin/bash
# Train on several nodes of a Slurm cluster: sbatch docs/slurm.sh configs/fineweb_edu.toml --train.out_dir /shared/run
# A job that is preempted or reaches its time limit saves its step, is queued again, and goes on where it was.
#SBATCH --job-name=tril
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one torchrun a node, which starts a rank for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@180        # this script is told three minutes before the time limit
set -u

# A signal to the steps of this job, not to this script (srun itself would answer SIGTERM with a kill), goes through
# torchrun to every rank, which finishes its step; rank 0 saves. Preemption is a SIGTERM, followed by the partition's
# GraceTime: let that be long enough to save.
again() {
  trap '' USR1 TERM
  scancel --signal=TERM "$SLURM_JOB_ID"
  wait "$training"
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
}
trap again USR1 TERM

main_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # nodes count their restarts by themselves
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=150  # seconds that torchrun gives a rank to save; 30 by default

source .venv/bin/activate  # on a disk that all nodes see

# Ranks that leave with 75 have saved; the others are given the time to do so too.
srun --kill-on-bad-exit=0 torchrun \
  --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node=gpu --rdzv_backend=c10d \
  --rdzv_endpoint="$main_node:29400" --rdzv_id="$SLURM_JOB_ID" --max-restarts=3 \
  train.py "$@" &
training=$!
wait "$training"
