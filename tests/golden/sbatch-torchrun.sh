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
  export TWINRUN_NODE="$SLURM_NODEID"
  cd /shared/project
  export GLOO_SOCKET_IFNAME=ib0,ib1
  export NCCL_SOCKET_IFNAME=ib0,ib1
  export PYTHONPATH=/shared/project/src
  export PYTHONPYCACHEPREFIX=/shared/cache/bytecode
  export PYTHONDONTWRITEBYTECODE=''
  export OMP_NUM_THREADS=8
  export OMP_WAIT_POLICY=PASSIVE
  export TOLD=$'a \'quoted\' text with $HOME\012and a line'
  exec /shared/environment/bin/python -m torch.distributed.run --nnodes 2 --node-rank "$TWINRUN_NODE" --rdzv-backend static --rdzv-id a1b2 --rdzv-endpoint "$TWINRUN_FIRST_NODE":29400 --nproc-per-node 8 --log-dir /shared/run/log/nodes=2/node-"$TWINRUN_NODE" --redirects 3 /shared/project/train.py --job /shared/run/points/nodes=2/job.json
}
trap : TERM
rm --force /shared/run/points/nodes=2/stopped.json
status=0; srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 --input=none --output=/shared/run/log/nodes=2/launcher-%n.log bash -euc "$(declare -f start); start" || status=$?
state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
if [[ -e /shared/run/points/nodes=2/stopped.json && $state == RUNNING ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
