#!/bin/bash
#SBATCH --job-name=twinrun-nodes=2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --time=90
#SBATCH --partition=gpu
#SBATCH --account=research
#SBATCH --qos=high
#SBATCH --gres=gpu:h100:8
#SBATCH --exclude=node3,node[7-9]
#SBATCH --signal=TERM@120
#SBATCH --requeue
set -euo pipefail
RUN=/shared/run
TWINRUN_FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export RUN TWINRUN_FIRST_NODE
start() {
  export TWINRUN_RANK="$SLURM_PROCID" TWINRUN_LOCAL_RANK="$SLURM_LOCALID"
  export TWINRUN_NODE="$((TWINRUN_RANK / 8))"
  mkdir -p /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"
  exec > /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"/stdout.log 2> /shared/run/log/nodes=2/node-"$TWINRUN_NODE"/"$TWINRUN_LOCAL_RANK"/stderr.log
  cd /shared/project
  export GLOO_SOCKET_IFNAME=ib0,ib1
  export NCCL_SOCKET_IFNAME=ib0,ib1
  export PYTHONPATH=/shared/project/src
  export PYTHONPYCACHEPREFIX=/shared/cache/bytecode
  export PYTHONDONTWRITEBYTECODE=''
  export OMP_NUM_THREADS=8
  export OMP_WAIT_POLICY=PASSIVE
  export RANK="$TWINRUN_RANK"
  export LOCAL_RANK="$TWINRUN_LOCAL_RANK"
  export GROUP_RANK="$TWINRUN_NODE"
  export WORLD_SIZE=16
  export LOCAL_WORLD_SIZE=8
  export MASTER_ADDR="$TWINRUN_FIRST_NODE"
  export MASTER_PORT=29400
  export TOLD=$'a \'quoted\' text with $HOME\012and a line'
  exec /shared/environment/bin/python /shared/project/train.py --job /shared/run/points/nodes=2/job.json
}
trap : TERM
rm --force /shared/run/points/nodes=2/stopped.json
status=0; srun --nodes=2 --ntasks=16 --ntasks-per-node=8 --distribution=block --kill-on-bad-exit=1 --input=none bash -euc "$(declare -f start); start" || status=$?
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
if [[ -e /shared/run/points/nodes=2/stopped.json && $state == RUNNING ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
