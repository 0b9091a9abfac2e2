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
  export TWINRUN_NODE="$SLURM_NODEID"
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
  export TOLD=told
  export NCCL_IB_HCA=mlx5
  exec python3 -m torch.distributed.run --nnodes 2 --node-rank "$TWINRUN_NODE" --rdzv-backend static --rdzv-id a1b2 --rdzv-endpoint "$TWINRUN_FIRST_NODE":"$TWINRUN_PORT" --nproc-per-node 8 --log-dir /shared/run/log/nodes=2/node-"$TWINRUN_NODE" --redirects 3 /shared/project/train.py --job /shared/run/points/nodes=2/job.json
}
trap : TERM
export NVIDIA_VISIBLE_DEVICES=all
export NVIDIA_DRIVER_CAPABILITIES=compute,utility
export MELLANOX_VISIBLE_DEVICES=all
status=0; srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=96 --cpu-bind=none --kill-on-bad-exit=1 --input=none --output=/shared/run/log/nodes=2/launcher-%n.log --container-image=/shared/stack.sqsh --container-mounts=/shared/project:/shared/project:ro,/shared/data:/shared/data:ro,/shared/run:/shared/run:rw --container-readonly --no-container-mount-home --no-container-remap-root --no-container-entrypoint bash -euc "$(declare -f start); start" || status=$?
leave "$status"
