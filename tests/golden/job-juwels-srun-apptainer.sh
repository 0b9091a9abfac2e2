#!/bin/bash
#SBATCH --job-name=twinrun-nodes=2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=12
#SBATCH --time=120
#SBATCH --partition=booster
#SBATCH --account=research
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
start() {
  export TWINRUN_RANK="$SLURM_PROCID" TWINRUN_LOCAL_RANK="$SLURM_LOCALID"
  export TWINRUN_NODE="$((TWINRUN_RANK / 4))"
  mkdir -p /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"
  exec > /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"/stdout.log 2> /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"/stderr.log
  cd /shared/project
  getent ahosts "$TWINRUN_FIRST_NODE" > /dev/null || { echo "twinrun: $HOSTNAME does not know the name $TWINRUN_FIRST_NODE" >&2; exit 96; }
  export GLOO_SOCKET_IFNAME=ib0
  export NCCL_SOCKET_IFNAME=ib0
  export APPTAINERENV_PYTHONDONTWRITEBYTECODE=1
  export APPTAINERENV_PYTHONNOUSERSITE=1
  export APPTAINERENV_PYTHONPATH=/shared/project/src
  export APPTAINERENV_OMP_NUM_THREADS=12
  export APPTAINERENV_OMP_WAIT_POLICY=PASSIVE
  export APPTAINERENV_RANK="$TWINRUN_RANK"
  export APPTAINERENV_LOCAL_RANK="$TWINRUN_LOCAL_RANK"
  export APPTAINERENV_GROUP_RANK="$TWINRUN_NODE"
  export APPTAINERENV_WORLD_SIZE=8
  export APPTAINERENV_LOCAL_WORLD_SIZE=4
  export APPTAINERENV_MASTER_ADDR="$TWINRUN_FIRST_NODE"
  export APPTAINERENV_MASTER_PORT="$TWINRUN_PORT"
  export APPTAINERENV_TOLD=told
  export APPTAINERENV_NCCL_IB_TIMEOUT=50
  export APPTAINERENV_UCX_RC_TIMEOUT=4s
  exec apptainer exec --no-eval --home /tmp --no-mount cwd,tmp --nv --mount 'type=bind,"src=/shared/project","dst=/shared/project",ro' --mount 'type=bind,"src=/shared/data","dst=/shared/data",ro' --mount 'type=bind,"src=/shared/run","dst=/shared/run"' --pwd /shared/project /shared/stack.sif python3 /shared/project/train.py --job /shared/run/points/nodes=2/job.json
}
trap : TERM
status=0; srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --distribution=block --cpus-per-task=12 --cpu-bind=none --kill-on-bad-exit=1 --input=none bash -euc "$(declare -f start); start" || status=$?
leave "$status"
