"""Compatibility tags of wheels for the image of a stack: interpreter, C library and processor."""

from __future__ import annotations

from functools import cache

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from twinrun.manifests.stack import Stack

# Debian's architecture to Python's platform.machine().
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
# Of the newest base; wheels for an older C library run there too.
_NEWEST_GLIBC_MINOR = 39
_OLD_PLATFORMS = ("manylinux2014", "manylinux2010", "manylinux1", "linux")


def machine(stack: Stack) -> str:
    """Return the `platform.machine()` of the image."""
    return _MACHINES.get(stack.architecture(), stack.architecture())


def platforms(stack: Stack) -> list[str]:
    """Return the platform tags of wheels that run in the image, best first."""
    new = [f"manylinux_2_{minor}" for minor in range(_NEWEST_GLIBC_MINOR, 4, -1)]
    return [f"{name}_{machine(stack)}" for name in (*new, *_OLD_PLATFORMS)]


def is_compatible(file_name: str, stack: Stack) -> bool:
    """Say whether the wheel of this file name runs in the image."""
    try:
        *_, tags = parse_wheel_filename(file_name)
    except InvalidWheelFilename:
        return False
    return not tags.isdisjoint(_supported(stack.interpreter(), tuple(platforms(stack))))


@cache
def _supported(interpreter: str, names: tuple[str, ...]) -> frozenset[Tag]:
    major, _, minor = interpreter.partition(".")
    version = (int(major), int(minor))
    own = cpython_tags(version, platforms=names)
    return frozenset((*own, *compatible_tags(version, f"cp{major}{minor}", names)))
