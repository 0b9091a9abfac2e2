"""SkyPilot, for Kubernetes, hosts by ssh and clouds: each point as a task file that `sky launch` takes.

The stack is the image of the task, and the site's folders are volumes or buckets under the path that this
machine has them at. A cluster is made for each point, and goes when its job has ended.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from twinrun.execution.batch import BatchScheduler, JobState, NodeState
from twinrun.execution.engine import Container
from twinrun.execution.job_script import FIRST_NODE, PORT, STATUS_FILE, JobScript, Task, word

# As many letters as leave room for what clouds add to the name of a machine.
_NAME_LETTERS = 30
_FIRST = 'echo "$SKYPILOT_NODE_IPS"'


class SkyPilot(BatchScheduler):
    """The SkyPilot of a site, whose `partition` is its infrastructure: `k8s/CONTEXT`, `ssh/POOL`, `aws`."""

    name, title, prefix, number, hosts = "skypilot", "SkyPilot", "#", "SKYPILOT_NODE_RANK", _FIRST
    node = "$SKYPILOT_NODE_RANK"
    cancel_words = ("sky", "down", "--yes")
    leaves_status = True

    def options(self, task: Task) -> Iterator[str]:
        """Yield the lines of the task file before its script; values are JSON, which is YAML."""
        one, container = self.site.site, self._container(task)
        resources: dict[str, object] = {"infra": one.partition} if one.partition else {}
        if one.gres:
            resources["accelerators"] = {one.gres: task.ranks_per_node}
        resources["cpus"] = f"{task.cores_per_rank * task.ranks_per_node}+"
        if memory := self.memory_gib(task):
            resources["memory"] = f"{memory}+"
        if container:
            resources["image_id"] = f"docker:{container.image}"
        if one.infiniband:
            resources["network_tier"] = "best"
        volumes = {path: name for path, name in one.volumes.items() if "://" not in name}
        buckets = {
            path: {"source": name, "mode": "MOUNT"} for path, name in one.volumes.items() if "://" in name
        }
        letters = re.sub(r"[^a-z0-9]+", "-", task.job_name.lower())[:_NAME_LETTERS]
        yield f"name: {letters.strip('-')}"
        yield f"num_nodes: {task.nodes}"
        for key, table in (("resources", resources), ("volumes", volumes), ("file_mounts", buckets)):
            if table:
                yield f"{key}:"
                yield from (f"  {name}: {json.dumps(value)}" for name, value in table.items())

    def _container(self, task: Task) -> Container | None:
        return task.commands[0].container if task.commands else None

    def script(self, task: Task, *, run: str, logs: str) -> str:
        """Return the task file of `task`; pure."""
        (command,), container, inner = task.commands, self._container(task), task
        if container:
            # The task runs inside the image: its folders are found under the paths that a container has.
            inside = {"arguments": ("python3", *container.arguments), "variables": container.variables}
            own = command.model_copy(update={**inside, "container": None})
            inner = task.model_copy(update={"commands": (own,)})
        script = JobScript(task=inner, run=run, logs=logs, dialect=self)
        lines = [
            "set -euo pipefail",
            f"RUN={word(run, names=())}" if run != "$RUN" else "",
            f"{FIRST_NODE}=$({_FIRST} | sed -n 1p) {PORT}=29400",
            f"export RUN {FIRST_NODE} {PORT}",
            f'leave() {{ echo "$1" > {word(f"{logs}/{STATUS_FILE}")}; exit "$1"; }}',
            *(
                f"mkdir -p {Path(mount.inside).parent}; ln -sfn {word(mount.host)} {mount.inside}"
                for mount in (container.mounts if container else ())
            ),
            *script.set_up(),
            f'start() {{ exec > {word(f"{logs}/launcher-")}"$SKYPILOT_NODE_RANK".log 2>&1',
            *(f"  {line}" for line in script.body()),
            "}",
            'status=0; bash -euc "$(declare -f start); start" || status=$?',
            "((status || SKYPILOT_NODE_RANK)) || leave 0",
            '((!status)) || leave "$status"',
        ]
        text = "".join(f"  {line}\n" for line in lines if line)
        return "\n".join([*self.options(task), "run: |", text])

    def submit_words(self, run: Path, logs: Path) -> tuple[str, ...]:
        """Return the launch of a task file on a cluster of its own."""
        own = f"twinrun-{uuid.uuid4().hex[:12]}"
        return ("sky", "launch", "--detach-run", "--yes", "--down", "--cluster", own)

    def all_jobs(self) -> list[JobState]:
        """Return the clusters of this user, each of which is a job's."""
        words = ("sky", "status", "--output", "json")
        found = self.told(lambda text: json.loads(text[text.index("[") :]), *words)
        keys = {"id": "name", "name": "name", "state": "status", "user": "user_name"}
        return [JobState(**{key: one.get(name, "") for key, name in keys.items()}) for one in found]

    def all_nodes(self) -> list[NodeState]:
        """Return as many nodes as cluster.toml says: they are made for a job."""
        one = self.site.site
        devices = {one.gres: one.devices_per_node} if one.gres else {}
        node = NodeState(name="", cores=one.cores_per_node, memory_gib=one.memory_gib or 0, devices=devices)
        return [node.model_copy(update={"name": f"node{number}"}) for number in range(one.nodes)]

    def version(self) -> str:
        """Return what `sky` says of itself."""
        return self.ask("sky", "--version").strip()
