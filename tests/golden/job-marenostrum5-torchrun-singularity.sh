#!/bin/bash -l
#SBATCH --job-name=twinrun-nodes=2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=20
#SBATCH --time=120
#SBATCH --partition=acc
#SBATCH --account=bsc00
#SBATCH --qos=acc_resa
#SBATCH --gres=gpu:4
#SBATCH --no-requeue
set -euo pipefail
RUN=/shared/run
rm --force /shared/run/log/nodes=2/status
leave() { echo "$1" > /shared/run/log/nodes=2/status; exit "$1"; }
TWINRUN_FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
TWINRUN_PORT=$((10000 + SLURM_JOB_ID % 20000))
export RUN TWINRUN_FIRST_NODE TWINRUN_PORT
ulimit -l unlimited || true
set_up() { set +eu; eval "$1" || { echo "twinrun: this set-up line failed: $1" >&2; leave 97; }; set -eu; }
set_up 'module load singularity'
start() {
  export TWINRUN_NODE="$SLURM_NODEID"
  cd /shared/project
  getent ahosts "$TWINRUN_FIRST_NODE" > /dev/null || { echo "twinrun: $HOSTNAME does not know the name $TWINRUN_FIRST_NODE" >&2; exit 96; }
  export GLOO_SOCKET_IFNAME=ib0,ib1,ib2,ib3
  export NCCL_SOCKET_IFNAME=ib0,ib1,ib2,ib3
  export SINGULARITYENV_PYTHONDONTWRITEBYTECODE=1
  export SINGULARITYENV_PYTHONNOUSERSITE=1
  export SINGULARITYENV_PYTHONPATH=/shared/project/src
  export SINGULARITYENV_OMP_NUM_THREADS=20
  export SINGULARITYENV_OMP_WAIT_POLICY=PASSIVE
  export SINGULARITYENV_TOLD=told
  exec singularity exec --no-eval --home /tmp --no-mount cwd,tmp --nv --mount 'type=bind,"src=/shared/project","dst=/shared/project",ro' --mount 'type=bind,"src=/shared/data","dst=/shared/data",ro' --mount 'type=bind,"src=/shared/run","dst=/shared/run"' --pwd /shared/project /shared/stack.sif python3 -m torch.distributed.run --nnodes 2 --node-rank "$TWINRUN_NODE" --rdzv-backend static --rdzv-id a1b2 --rdzv-endpoint "$TWINRUN_FIRST_NODE":"$TWINRUN_PORT" --nproc-per-node 4 --log-dir /shared/run/log/nodes=2/node-"$TWINRUN_NODE" --redirects 3 /shared/project/train.py --job /shared/run/points/nodes=2/job.json
}
trap : TERM
status=0; srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=80 --cpu-bind=none --kill-on-bad-exit=1 --input=none --output=/shared/run/log/nodes=2/launcher-%n.log bash -euc "$(declare -f start); start" || status=$?
leave "$status"
