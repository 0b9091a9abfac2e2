#!/bin/bash
#SBATCH --job-name=twinrun-nodes=2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --mem=0
#SBATCH --time=120
#SBATCH --partition=batch
#SBATCH --account=research
#SBATCH --constraint=h100
#SBATCH --gres=gpu:h100:8
#SBATCH --exclusive
#SBATCH --no-requeue
set -euo pipefail
RUN=/shared/run
rm --force /shared/run/log/nodes=2/status
leave() { echo "$1" > /shared/run/log/nodes=2/status; exit "$1"; }
TWINRUN_FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
TWINRUN_PORT=$((10000 + SLURM_JOB_ID % 20000))
export RUN TWINRUN_FIRST_NODE TWINRUN_PORT
ulimit -l unlimited || true
start() {
  export TWINRUN_RANK="$SLURM_PROCID" TWINRUN_LOCAL_RANK="$SLURM_LOCALID"
  export TWINRUN_NODE="$((TWINRUN_RANK / 8))"
  mkdir -p /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"
  exec > /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"/stdout.log 2> /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"/stderr.log
  cd /shared/project
  getent ahosts "$TWINRUN_FIRST_NODE" > /dev/null || { echo "twinrun: $HOSTNAME does not know the name $TWINRUN_FIRST_NODE" >&2; exit 96; }
  export GLOO_SOCKET_IFNAME=ibp24s0
  export NCCL_SOCKET_IFNAME=ibp24s0
  export PYTHONDONTWRITEBYTECODE=1
  export PYTHONNOUSERSITE=1
  export HOME=/tmp
  export PYTHONPATH=/shared/project/src
  export OMP_NUM_THREADS=12
  export OMP_WAIT_POLICY=PASSIVE
  export RANK="$TWINRUN_RANK"
  export LOCAL_RANK="$TWINRUN_LOCAL_RANK"
  export GROUP_RANK="$TWINRUN_NODE"
  export WORLD_SIZE=16
  export LOCAL_WORLD_SIZE=8
  export MASTER_ADDR="$TWINRUN_FIRST_NODE"
  export MASTER_PORT="$TWINRUN_PORT"
  export TOLD=told
  export NCCL_IB_HCA=mlx5
  exec python3 /shared/project/train.py --job /shared/run/points/nodes=2/job.json
}
trap : TERM
export NVIDIA_VISIBLE_DEVICES=all
export NVIDIA_DRIVER_CAPABILITIES=compute,utility
export MELLANOX_VISIBLE_DEVICES=all
status=0; srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --distribution=block --cpus-per-task=12 --cpu-bind=none --kill-on-bad-exit=1 --input=none --container-image=/shared/stack.sqsh --container-mounts=/shared/project:/shared/project:ro,/shared/data:/shared/data:ro,/shared/run:/shared/run:rw --container-readonly --no-container-mount-home --no-container-remap-root --no-container-entrypoint bash -euc "$(declare -f start); start" || status=$?
leave "$status"
