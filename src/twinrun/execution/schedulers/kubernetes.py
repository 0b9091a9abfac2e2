"""Kubernetes: each point as a JobSet that `--dry` prints and kubectl takes; nothing is submitted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from twinrun.execution import shell
from twinrun.execution.container import (
    SHARED_MEMORY,
    TEMPORARY_FOLDER,
    TEMPORARY_SIZE,
    WORKING_FOLDER,
    Container,
)
from twinrun.execution.schedulers import Start, Submission
from twinrun.execution.task import Abilities, Task
from twinrun.foundation.errors import InputError, MachineError
from twinrun.manifests.cluster import LoadedSite, Site

_ONLY = "a JobSet is printed, not submitted"
_HINT = "`--dry --json` prints it; with RUN replaced, `kubectl apply` takes it"
API = "jobset.x-k8s.io/v1alpha2"
# The one kind of pod that there is, and the job of all of them.
NODE = "node"
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
# As many letters as leave room for what Kubernetes adds to the name of a pod.
_NAME_LETTERS = 40
_MEMORY_FOLDERS = {"shm": ("/dev/shm", SHARED_MEMORY), "tmp": (TEMPORARY_FOLDER, TEMPORARY_SIZE)}  # noqa: S108
# Times that a set is started again where its pods are taken away or die.
_RESTARTS = 3


def open_scheduler(*, site: LoadedSite | None) -> Kubernetes:
    """Return the Kubernetes of a site; raises InputError without one."""
    if site is None:
        hint = "add --cluster SITE, of cluster.toml"
        raise InputError("a site is needed", place="--scheduler kubernetes", found="no --cluster", hint=hint)
    return Kubernetes(site)


class Kubernetes:
    """The scheduler of one site."""

    name = "kubernetes"
    abilities = Abilities()

    def __init__(self, site: LoadedSite) -> None:
        self.site = site

    def demand(self) -> None:
        """Ask for nothing."""

    def size(self) -> int:
        """Return what cluster.toml says: nothing is asked of the cluster."""
        return self.site.site.nodes

    def unusable(self, *, nodes: int) -> str | None:
        """Return why no nodes can be had from here."""
        return _ONLY

    def first_node(self) -> str:
        """Return the variable of the pods that has the first one."""
        return f"${shell.FIRST_NODE}"

    def port(self) -> str:
        """Return a port that is free in every pod, whose network is its own."""
        return "29400"

    def node_names(self, nodes: int) -> tuple[str, ...]:
        """Return one variable: all pods start the same command."""
        return (f"${shell.NODE}",)

    def script(self, task: Task, *, run: str, logs: str) -> str:
        """Return the JobSet of `task`, as JSON, which is YAML as well; pure."""
        return json.dumps(job_set(task, site=self.site), indent=1) + "\n"

    def submit(self, task: Task, *, run: Path, logs: Path, start: Start) -> Submission:
        """Raise MachineError: nothing is submitted from here."""
        raise MachineError(_ONLY, place="--scheduler kubernetes", found=task.point, hint=_HINT)

    def adopt(self, handle: str, *, point: str, logs: Path) -> Submission:
        """Raise MachineError: nothing was submitted from here."""
        raise MachineError(_ONLY, place="--scheduler kubernetes", found=handle, hint=_HINT)


def job_set(task: Task, *, site: LoadedSite) -> dict[str, Any]:
    """Return the JobSet of `task`; pure.

    Raises:
        InputError: an engine without containers, or nodes to leave out that are no single names.
        MachineError: a command that must hand the run folder over, which only this machine can.
    """
    (command,) = task.commands
    if command.container is None:
        raise InputError(
            "a pod is a container", place=f"{site.place}.engine", found=site.site.engine, allowed="docker"
        )
    if command.writer:
        raise MachineError(
            "in a pod, containers run as their caller, who must not be root",
            place=f"{site.place}.engine",
            found=site.site.engine,
            hint="run twinrun as another user",
        )
    name = _name(task.point)
    pods = {
        "parallelism": task.nodes,
        "completions": task.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "activeDeadlineSeconds": site.site.minutes * 60,
        "template": {"spec": _pod(task, command.container, name, site)},
    }
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": _metadata(name, site.site),
        "spec": {
            "failurePolicy": {"maxRestarts": _RESTARTS if site.site.requeue else 0},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": pods}}],
        },
    }


def _name(point: str) -> str:
    """Return a name that is a label of DNS."""
    letters = re.sub(r"[^a-z0-9]+", "-", f"twinrun-{point}".lower())
    return letters[:_NAME_LETTERS].strip("-")


def _metadata(name: str, site: Site) -> dict[str, Any]:
    """Return the names under which a site counts the job: a queue of Kueue, and a namespace."""
    labels = {"app.kubernetes.io/managed-by": "twinrun"}
    if site.partition:
        labels["kueue.x-k8s.io/queue-name"] = site.partition
    namespace = {"namespace": site.account} if site.account else {}
    return {"name": name, **namespace, "labels": labels}


def _pod(task: Task, container: Container, name: str, site: LoadedSite) -> dict[str, Any]:
    user, _, group = container.user.partition(":")
    context = {"runAsUser": int(user), "runAsGroup": int(group), "fsGroup": int(group)}
    pod: dict[str, Any] = {
        # Adapters with direct access to memory are reached through the node's own network.
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if site.site.infiniband else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": site.site.signal_seconds or 30,
        "automountServiceAccountToken": False,
        "securityContext": {**context, "supplementalGroups": list(container.groups)},
        "containers": [_container(task, container, name, site.site)],
        "volumes": [*_volumes(container)],
    }
    if site.site.qos:
        pod["priorityClassName"] = site.site.qos
    if site.site.exclude:
        pod["affinity"] = _elsewhere(site)
    return pod


def _container(task: Task, container: Container, name: str, site: Site) -> dict[str, Any]:
    count = {container.resource: str(task.ranks_per_node)} if container.resource else {}
    count |= {site.rdma_resource: "1"} if site.rdma_resource else {}
    memory = {"memory": f"{site.memory_gib}Gi"} if site.memory_gib else {}
    mounts = [
        {"name": f"folder-{number}", "mountPath": mount.inside, "readOnly": mount.mode == "ro"}
        for number, mount in enumerate(container.mounts)
    ]
    folders = [{"name": key, "mountPath": path} for key, (path, _) in _MEMORY_FOLDERS.items()]
    return {
        "name": NODE,
        "image": container.image,
        "command": ["python3"],
        "args": [_expanded(one) for one in container.arguments],
        "workingDir": WORKING_FOLDER,
        "env": [*_variables(task, container, name, site)],
        "resources": {
            "requests": {"cpu": str(task.cores_per_rank * task.ranks_per_node), **memory},
            "limits": {**count, **memory},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            # Adapters need memory that is never swapped out.
            "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if site.infiniband else {})},
        },
        "volumeMounts": [*mounts, *folders],
    }


def _variables(task: Task, container: Container, name: str, site: Site) -> Iterator[dict[str, Any]]:
    """Yield the variables of the ranks, after those that the arguments are made of."""
    yield {"name": shell.NODE, "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}
    # The names that JobSet gives to its pods, and to the service that finds them.
    yield {"name": shell.FIRST_NODE, "value": f"{name}-{NODE}-0-0.{name}"}
    # A pod without the node's network has interfaces of its own, with other names.
    if site.interfaces and site.infiniband and task.nodes > 1:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            yield {"name": variable, "value": ",".join(site.interfaces)}
    for variable, value in container.variables.items():
        yield {"name": variable, "value": _expanded(value)}


def _volumes(container: Container) -> Iterator[dict[str, Any]]:
    """Yield the folders that nodes see under the same path as this machine, and those in memory."""
    for number, mount in enumerate(container.mounts):
        yield {"name": f"folder-{number}", "hostPath": {"path": mount.host, "type": "Directory"}}
    for name, (_, size) in _MEMORY_FOLDERS.items():
        yield {"name": name, "emptyDir": {"medium": "Memory", "sizeLimit": f"{size[:-1]}Gi"}}


def _elsewhere(site: LoadedSite) -> dict[str, Any]:
    named = list(site.site.exclude)
    if ranges := [one for one in named if not re.fullmatch(r"[a-z0-9.-]+", one)]:
        raise InputError(
            "Kubernetes leaves out single nodes",
            place=f"{site.place}.exclude",
            found=ranges,
            hint="name each",
        )
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": named}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def _expanded(text: str) -> str:
    """Return `text` with our variables as Kubernetes writes them, and nothing else that it would replace."""
    pattern = rf"\$({shell.FIRST_NODE}|{shell.NODE})(?![A-Za-z0-9_])|\$"
    return re.sub(pattern, lambda found: f"$({found[1]})" if found[1] else "$$", text)
