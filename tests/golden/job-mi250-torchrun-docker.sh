#!/bin/bash
#SBATCH --job-name=twinrun-nodes=2
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --mem=960G
#SBATCH --time=240
#SBATCH --partition=gpu
#SBATCH --account=research
#SBATCH --gres=gpu:mi250:8
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
  export GLOO_SOCKET_IFNAME=ib0
  export NCCL_SOCKET_IFNAME=ib0
  name=twinrun-"$TWINRUN_PORT"-"$TWINRUN_NODE"
  TWINRUN_IMAGE="$(docker image inspect --format '{{.Id}}' twinrun/stack:a1b2)"
  export TWINRUN_IMAGE
  groups=() cgroup=()
  docker rm --force "$name" > /dev/null 2>&1 || true
  for file in /dev/kfd /dev/dri/renderD*; do [[ ! -e $file ]] || groups+=(--group-add "$(stat --format=%g "$file")"); done
  parent=$(sed -n 's/^[^:]*:\(memory\|\):\(.*\/job_.*\)\/[^/]*$/\2/p' /proc/self/cgroup | tail -n 1)
  [[ -z $parent || $(docker info --format '{{.CgroupDriver}}') != cgroupfs ]] || cgroup=(--cgroup-parent "$parent")
  exec docker run --name "$name" "${groups[@]}" "${cgroup[@]}" --rm --interactive --init --read-only --cap-drop ALL --security-opt no-new-privileges --user 1234:1234 --shm-size 16g --label dev.twinrun.container=run --tmpfs /tmp:rw,exec,size=8g --network host --env TWINRUN_IMAGE --volume /shared/project:/twinrun/project:ro --volume /shared/data:/twinrun/data:ro --volume /shared/run:/twinrun/run:rw --device /dev/kfd:/dev/kfd:rwm --device /dev/dri:/dev/dri:rwm --device /dev/infiniband:/dev/infiniband:rwm --ulimit memlock=-1:-1 --env PYTHONDONTWRITEBYTECODE=1 --env HOME=/tmp --env USER=twinrun --env PYTHONPATH=/twinrun/project/src --env OMP_NUM_THREADS=16 --env OMP_WAIT_POLICY=PASSIVE --env TOLD=told --env NCCL_IB_HCA=mlx5 --env NCCL_NET_GDR_LEVEL=PHB --workdir /twinrun/project --entrypoint /bin/sh twinrun/stack:a1b2 -c 'exec 3<&0 </dev/null; { read -r seconds <&3 && { while read -r _ <&3; do :; done; kill -TERM -1; sleep "$seconds"; kill -KILL -1; }; } 2>/dev/null & exec 3<&-; exec python3 "$@"' twinrun -m torch.distributed.run --nnodes 2 --node-rank "$TWINRUN_NODE" --rdzv-backend static --rdzv-id a1b2 --rdzv-endpoint "$TWINRUN_FIRST_NODE":"$TWINRUN_PORT" --nproc-per-node 8 --log-dir /twinrun/run/log/nodes=2/node-"$TWINRUN_NODE" --redirects 3 /twinrun/project/train.py --job /twinrun/run/points/nodes=2/job.json <> <(echo 0)
}
trap : TERM
status=0; srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=128 --cpu-bind=none --kill-on-bad-exit=1 --input=none --output=/shared/run/log/nodes=2/launcher-%n.log bash -euc "$(declare -f start); start" || status=$?
leave "$status"
