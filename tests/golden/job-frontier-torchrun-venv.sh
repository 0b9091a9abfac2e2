#!/bin/bash -l
#SBATCH --job-name=twinrun-nodes=2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --time=120
#SBATCH --partition=batch
#SBATCH --account=abc123
#SBATCH --gpus-per-node=8
#SBATCH --no-requeue
#SBATCH --network=disable_rdzv_get
set -euo pipefail
RUN=/shared/run
rm --force /shared/run/log/nodes=2/status
leave() { echo "$1" > /shared/run/log/nodes=2/status; exit "$1"; }
TWINRUN_FIRST_NODE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
TWINRUN_PORT=$((10000 + SLURM_JOB_ID % 20000))
export RUN TWINRUN_FIRST_NODE TWINRUN_PORT
set_up() { set +eu; eval "$1" || { echo "twinrun: this set-up line failed: $1" >&2; leave 97; }; set -eu; }
set_up 'module load PrgEnv-gnu/8.7.0'
set_up 'module load rocm/7.1.1'
set_up 'module load rccl-net-plugin'
set_up 'module load craype-accel-amd-gfx90a'
start() {
  export TWINRUN_NODE="$SLURM_NODEID"
  cd /shared/project
  getent ahosts "$TWINRUN_FIRST_NODE" > /dev/null || { echo "twinrun: $HOSTNAME does not know the name $TWINRUN_FIRST_NODE" >&2; exit 96; }
  export GLOO_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
  export NCCL_SOCKET_IFNAME=hsn0,hsn1,hsn2,hsn3
  export PYTHONPATH=/shared/project/src
  export PYTHONPYCACHEPREFIX=/shared/cache/bytecode
  export PYTHONDONTWRITEBYTECODE=''
  export OMP_NUM_THREADS=7
  export OMP_WAIT_POLICY=PASSIVE
  export TOLD=told
  export NCCL_CROSS_NIC=1
  export NCCL_NET_GDR_LEVEL=PHB
  export HSA_FORCE_FINE_GRAIN_PCIE=1
  export FI_MR_CACHE_MONITOR=kdreg2
  export FI_CXI_DISABLE_HOST_REGISTER=1
  export FI_CXI_DEFAULT_CQ_SIZE=131072
  export FI_CXI_DEFAULT_TX_SIZE=2048
  export FI_CXI_RDZV_PROTO=alt_read
  export FI_CXI_RDZV_EAGER_SIZE=0
  export FI_CXI_RDZV_THRESHOLD=0
  export FI_CXI_RDZV_GET_MIN=0
  export FI_CXI_RX_MATCH_MODE=hybrid
  exec /shared/environment/bin/python -m torch.distributed.run --nnodes 2 --node-rank "$TWINRUN_NODE" --rdzv-backend static --rdzv-id a1b2 --rdzv-endpoint "$TWINRUN_FIRST_NODE":"$TWINRUN_PORT" --nproc-per-node 8 --log-dir /shared/run/log/nodes=2/node-"$TWINRUN_NODE" --redirects 3 /shared/project/train.py --job /shared/run/points/nodes=2/job.json
}
trap : TERM
status=0; srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=56 --cpu-bind=none --kill-on-bad-exit=1 --input=none --output=/shared/run/log/nodes=2/launcher-%n.log bash -euc "$(declare -f start); start" || status=$?
leave "$status"
