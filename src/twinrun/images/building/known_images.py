"""Images that are known to be of a plan: built here, committed beside the locks, or named by their digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinrun.foundation.errors import MachineError
from twinrun.images.building.plan import BuildPlan
from twinrun.images.building.transfer import pull
from twinrun.machine import daemon
from twinrun.manifests.image_identity import record_built

if TYPE_CHECKING:
    from docker import DockerClient


def find_known(client: DockerClient, plan: BuildPlan) -> str | None:
    """Return what the engine calls the image that was built or is committed, if its labels are the plan's."""
    known = plan.stack.known_ids()
    for found in daemon.labelled_images(client, plan.stack.inputs_label()) if known else ():
        labels = client.images.get(found).attrs["Config"]["Labels"]
        if labels == plan.labels and daemon.image_id(client, found) in known:
            return found
    return None


def pull_known(client: DockerClient, plan: BuildPlan, reference: str) -> str:
    """Pull `repository@sha256:...` and return what the engine calls it; who names a digest vouches for it.

    Raises:
        MachineError: it cannot be pulled, or is not of these inputs; nothing was tagged.
    """
    found = pull(client, reference)
    attributes = client.images.get(found).attrs
    labels = attributes["Config"]["Labels"] or {}
    if labels != plan.labels:
        raise MachineError(
            "the image is of other inputs than this checkout's",
            place=reference,
            found=[f"{name}={value}" for name, value in sorted(labels.items() - plan.labels.items())],
            allowed=[f"{name}={value}" for name, value in sorted(plan.labels.items() - labels.items())],
            hint="check the commit out that it was built of",
        )
    own, hint = daemon.image_id(client, found), "somebody else's build; nothing was tagged"
    check_committed(plan, own, attributes["RootFS"]["Layers"], hint=hint)
    record_built(plan.image, own)
    return found


def check_committed(plan: BuildPlan, found: str, layers: list[str], *, hint: str) -> None:
    """Refuse an image that differs from the committed one of the same inputs; raises MachineError."""
    committed = plan.stack.committed
    if committed and not plan.unverified and found != committed.digest:
        pairs = zip(("base", *plan.stages), layers, committed.layers, strict=False)
        differ = [name for name, own, other in pairs if own != other]
        raise MachineError(
            "this is not the committed image of the same inputs",
            place=f"{plan.stack.folder}/contents.json: digest",
            found=found,
            allowed=committed.digest,
            hint=f"{hint}; layers that differ: {', '.join(differ) or 'none'}",
        )
