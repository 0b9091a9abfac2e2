"""The 18 checks in the order of the publication: each passes, fails or is unknown, with a remedy."""

from __future__ import annotations

import hardware
import messages
import performance
import scheduler
import storage
import training
import workers

from twinrun.train import checks

CHECKS = {
    "enumerate-gpus": hardware.enumerate_gpus,
    "enumerate-workers": workers.enumerate_workers,
    "slurm-gres": scheduler.slurm_gres,
    "network-interfaces": workers.network_interfaces,
    "network-topology": hardware.network_topology,
    "mpi-launch": scheduler.mpi_launch,
    "rank-communication": messages.rank_communication,
    "link-performance": performance.link_performance,
    "collective-function": messages.collective_function,
    "collective-performance": performance.collective_performance,
    "scheduling-priority": scheduler.scheduling_priority,
    "qos-enforcement": scheduler.qos_enforcement,
    "checkpoint-restart": storage.checkpoint_restart,
    "model-distribution": storage.model_distribution,
    "train-one-gpu": training.train_one_gpu,
    "train-one-node": training.train_one_node,
    "train-many-nodes": training.train_many_nodes,
    "data-partitioning": storage.data_partitioning,
}

if __name__ == "__main__":
    checks.main(CHECKS)
