"""What a scheduler can do for a launcher, which asks for it and not for the scheduler's name."""

from __future__ import annotations

from twinrun.foundation.manifest import Frozen


class Abilities(Frozen):
    """What the allocation of a scheduler offers; one that offers nothing starts a command on each node."""

    steps: bool = False
    """Whether srun starts one process for each rank in it."""
    hosts: bool = False
    """Whether its script writes the hosts of a job to a file, for a starter of MPI."""
