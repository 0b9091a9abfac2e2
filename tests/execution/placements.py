"""A site and placements that tests of launchers, schedulers and ranks share."""

from __future__ import annotations

from twinrun.execution.engine import Engine, Workspace
from twinrun.execution.launchers import load_launcher
from twinrun.execution.ranks import Ranks
from twinrun.execution.schedulers import load_scheduler
from twinrun.manifests.cluster import LoadedSite, Site
from twinrun.protocol.allocation import Placement

# A site with everything that a job can say.
SITE = LoadedSite(
    name="hpc",
    place="cluster.toml:site.hpc",
    site=Site.model_validate(
        {"scheduler": "slurm", "vendor": "cpu", "nodes": 1024, "devices_per_node": 8, "cores_per_node": 64}
        | {"partition": "gpu", "account": "research", "qos": "high", "minutes": 90, "gres": "gpu:h100"}
        | {"parallel_environment": "mpi", "exclude": ("node3", "node[7-9]"), "requeue": True}
        | {"signal_seconds": 120, "interfaces": ("ib0", "ib1"), "shared": ("/shared",)}
    ),
)


class PlacementStandIn(Placement):
    """A placement."""

    id: str = "here"
    nodes: int = 1
    devices_per_node: int = 1


def commands_of(
    engine: Engine,
    workspace: Workspace,
    *,
    launcher: str = "torchrun",
    site: LoadedSite | None = None,
    **told: str,
) -> Ranks:
    """Return what starts ranks on this machine, which has four cores, or at a site."""
    scheduler = load_scheduler(site.site.scheduler if site else "local", site=site)
    chosen = load_launcher(launcher)
    return Ranks(
        engine=engine, launcher=chosen, scheduler=scheduler, workspace=workspace, cores=4, variables=told
    )
