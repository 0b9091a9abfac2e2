"""Resolution of system packages by apt to versions and checksums, dependencies included."""

from __future__ import annotations

from twinrun.images.apt_archive import ESSENTIAL, AptArchive
from twinrun.manifests.locks import AptLock
from twinrun.manifests.stack import Stack

# usr-is-merged is installed before all others: /bin is a link from the start.
_ROOT = (*ESSENTIAL, "usr-is-merged")


def resolve_system(stack: Stack, archive: AptArchive) -> AptLock:
    """Return the system packages of a stack, each in the first stage that needs it.

    Raises:
        InputError: no such package in the suite.
    """
    base, runtime = archive.resolve(_ROOT), archive.resolve(stack.packages)
    return AptLock(base=base, runtime=runtime, build=archive.resolve(stack.build_packages))
