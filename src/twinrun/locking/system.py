"""System packages resolved by apt to versions and digests, with all that they depend on."""

from __future__ import annotations

from twinrun.apt import AptLock
from twinrun.archive import ESSENTIAL, Archive
from twinrun.stack import Stack

# Installed before all others: /bin is a link from the start.
_ROOT = (*ESSENTIAL, "usr-is-merged")


def resolve_system(stack: Stack, archive: Archive) -> AptLock:
    """Return the system packages of a stack, each in the first stage that needs it.

    On an image of a registry only what every image of the suite has is taken to be there.

    Raises:
        InputError: no such package in the suite.
    """
    assert stack.base is not None
    made_here = stack.base.kind == "debian"
    base = archive.resolve(_ROOT if made_here else ESSENTIAL)
    runtime = archive.resolve(stack.packages)
    return AptLock(
        base=base if made_here else (), runtime=runtime, build=archive.resolve(stack.build_packages)
    )
