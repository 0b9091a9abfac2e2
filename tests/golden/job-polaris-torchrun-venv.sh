#!/bin/bash -l
#PBS -N twinrun-nodes-2
#PBS -S /bin/bash
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=01:30:00
#PBS -q prod
#PBS -A research
#PBS -r n
set -euo pipefail
RUN=/shared/run
rm --force /shared/run/log/nodes=2/status
leave() { echo "$1" > /shared/run/log/nodes=2/status; exit "$1"; }
TWINRUN_FIRST_NODE=$(awk '!seen[$0]++' "$PBS_NODEFILE" | sed -n 1p)
TWINRUN_PORT=$((10000 + ${PBS_JOBID%%[.[]*} % 20000))
export RUN TWINRUN_FIRST_NODE TWINRUN_PORT
start() {
  export TWINRUN_NODE="$node"
  cd /shared/project
  getent ahosts "$TWINRUN_FIRST_NODE" > /dev/null || { echo "twinrun: $HOSTNAME does not know the name $TWINRUN_FIRST_NODE" >&2; exit 96; }
  export PYTHONPATH=/shared/project/src
  export PYTHONPYCACHEPREFIX=/shared/cache/bytecode
  export PYTHONDONTWRITEBYTECODE=''
  export OMP_NUM_THREADS=8
  export OMP_WAIT_POLICY=PASSIVE
  export TOLD=told
  exec /shared/environment/bin/python -m torch.distributed.run --nnodes 2 --node-rank "$TWINRUN_NODE" --rdzv-backend static --rdzv-id a1b2 --rdzv-endpoint "$TWINRUN_FIRST_NODE":"$TWINRUN_PORT" --nproc-per-node 4 --log-dir /shared/run/log/nodes=2/node-"$TWINRUN_NODE" --redirects 3 /shared/project/train.py --job /shared/run/points/nodes=2/job.json
}
trap : TERM
TWINRUN_HOSTS=/shared/run/log/nodes=2/hosts
awk '!seen[$0]++' "$PBS_NODEFILE" > "$TWINRUN_HOSTS"
{
  declare -p RUN TWINRUN_FIRST_NODE TWINRUN_PORT | sed "s/^declare -x/export/"
  echo 'leave() { exit "$1"; }'
  printf '%s\n' 'set_up() { set +eu; eval "$1" || { echo "twinrun: this set-up line failed: $1" >&2; leave 97; }; set -eu; }'
  printf '%s\n' 'set_up '"'"'module load conda'"'"''
  declare -f start; echo 'node=$1; start'
} > /shared/run/log/nodes=2/start.sh
everywhere() {
  local node=0 host there
  while read -r host <&3; do
    there=(pbs_tmrsh "$host"); ((node > 0)) || there=()
    "${there[@]}" /bin/bash -eu /shared/run/log/nodes=2/start.sh "$node" > /shared/run/log/nodes=2/launcher-$node.log 2>&1 < /dev/null &
    node=$((node + 1))
  done 3< "$TWINRUN_HOSTS"
  for ((node = 0; node < 2; node++)); do
    wait -n || { status=$?; kill $(jobs -p) 2> /dev/null; wait; return $status; }
  done
}
status=0; everywhere || status=$?
leave "$status"
