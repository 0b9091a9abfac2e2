#!/bin/bash -l
#SBATCH --job-name=twinrun-nodes=2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --mem=480G
#SBATCH --time=120
#SBATCH --partition=standard-g
#SBATCH --account=project_465000000
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --no-requeue
#SBATCH --hint=nomultithread
set -euo pipefail
RUN=/shared/run
rm --force /shared/run/log/nodes=2/status
leave() { echo "$1" > /shared/run/log/nodes=2/status; exit "$1"; }
TWINRUN_FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
TWINRUN_PORT=$((10000 + SLURM_JOB_ID % 20000))
export RUN TWINRUN_FIRST_NODE TWINRUN_PORT
set_up() { set +eu; eval "$1" || { echo "twinrun: this set-up line failed: $1" >&2; leave 97; }; set -eu; }
set_up 'module load LUMI/24.03 partition/G'
set_up 'module load singularity-AI-bindings'
set_up 'export MIOPEN_USER_DB_PATH=/tmp/$USER-miopen-$SLURM_JOB_ID'
start() {
  export TWINRUN_RANK="$SLURM_PROCID" TWINRUN_LOCAL_RANK="$SLURM_LOCALID"
  export TWINRUN_NODE="$((TWINRUN_RANK / 8))"
  mkdir -p /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"
  exec > /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"/stdout.log 2> /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"/stderr.log
  cd /shared/project
  getent ahosts "$TWINRUN_FIRST_NODE" > /dev/null || { echo "twinrun: $HOSTNAME does not know the name $TWINRUN_FIRST_NODE" >&2; exit 96; }
  export GLOO_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
  export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
  export SINGULARITYENV_PYTHONDONTWRITEBYTECODE=1
  export SINGULARITYENV_PYTHONNOUSERSITE=1
  export SINGULARITYENV_PYTHONPATH=/shared/project/src
  export SINGULARITYENV_OMP_NUM_THREADS=7
  export SINGULARITYENV_OMP_WAIT_POLICY=PASSIVE
  export SINGULARITYENV_RANK="$TWINRUN_RANK"
  export SINGULARITYENV_LOCAL_RANK="$TWINRUN_LOCAL_RANK"
  export SINGULARITYENV_GROUP_RANK="$TWINRUN_NODE"
  export SINGULARITYENV_WORLD_SIZE=16
  export SINGULARITYENV_LOCAL_WORLD_SIZE=8
  export SINGULARITYENV_MASTER_ADDR="$TWINRUN_FIRST_NODE"
  export SINGULARITYENV_MASTER_PORT="$TWINRUN_PORT"
  export SINGULARITYENV_TOLD=told
  export SINGULARITYENV_NCCL_NET_GDR_LEVEL=PHB
  export SINGULARITYENV_FI_MR_CACHE_MONITOR=userfaultfd
  export SINGULARITYENV_FI_CXI_DEFAULT_CQ_SIZE=131072
  exec singularity exec --no-eval --home /tmp --no-mount cwd,tmp --rocm --mount 'type=bind,"src=/shared/project","dst=/shared/project",ro' --mount 'type=bind,"src=/shared/data","dst=/shared/data",ro' --mount 'type=bind,"src=/shared/run","dst=/shared/run"' --mount 'type=bind,"src=/var/spool/slurmd","dst=/var/spool/slurmd",ro' --mount 'type=bind,"src=/opt/cray","dst=/opt/cray",ro' --mount 'type=bind,"src=/usr/lib64/libcxi.so.1","dst=/usr/lib64/libcxi.so.1",ro' --pwd /shared/project /shared/stack.sif python3 /shared/project/train.py --job /shared/run/points/nodes=2/job.json
}
trap : TERM
status=0; srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --distribution=block --cpus-per-task=7 --cpu-bind=none --kill-on-bad-exit=1 --input=none bash -euc "$(declare -f start); start" || status=$?
leave "$status"
