"""Put this package's functions where code of others looks for upstream's, and take them away again.

Mamba-1's and Mamba-2's. A version whose insides are not known here is refused, because its slow path would
go on without a word.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import Any

from twinrun_mamba.conv import causal_conv1d_fn, causal_conv1d_update
from twinrun_mamba.inner import mamba_inner_fn
from twinrun_mamba.scan import selective_scan_fn, selective_state_update
from twinrun_mamba.ssd import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from twinrun_mamba.ssd import selective_state_update as ssd_state_update

logger = logging.getLogger("twinrun_mamba")
Values = Mapping[str, Any]
Release = tuple[int, int]


class InstallError(RuntimeError):
    """A package cannot take these functions; says which, what was found and what is allowed."""


@dataclass(frozen=True)
class Replacement:
    """One name of a module, with what it meant before."""

    module: str
    name: str
    before: Any
    now: Any

    def __str__(self) -> str:
        of = getattr(self.before, "__module__", None)
        found = "nothing" if self.before is None else f"that of {of}" if of else repr(self.before)
        return f"{self.module}.{self.name}: in place of {found}"


@dataclass(frozen=True)
class Installation:
    """What was replaced; as a context, until its end."""

    replaced: tuple[Replacement, ...]

    def uninstall(self) -> None:
        """Give every name its meaning back, but those that somebody else has replaced since."""
        for one in self.replaced:
            module = import_module(one.module)
            if getattr(module, one.name) is one.now:
                setattr(module, one.name, one.before)
            elif getattr(module, one.name) is not one.before:
                logger.warning("%s.%s is no longer this package's and stays as it is", one.module, one.name)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.uninstall()

    def __str__(self) -> str:
        return "\n".join(map(str, self.replaced))


@dataclass(frozen=True)
class _Known:
    """Releases of a package, first to last, and what its modules look up."""

    package: str
    first: Release
    last: Release
    modules: Mapping[str, Values]

    def __str__(self) -> str:
        first, last = (".".join(map(str, release)) for release in (self.first, self.last))
        return first if first == last else f"{first} to {last}"


def install(*packages: str) -> Installation:
    """Make code of these packages use this one's functions; return, and log, what was replaced.

    packages: of "transformers" (Mamba, Mamba-2, from 5.17 Falcon-Mamba) and "mamba_ssm" (Mamba, Mamba-2);
        none: those that are there. Models built before and after are served, in training and in generation
        with a cache. What was installed before is undone first.
    Raises InstallError, and replaces nothing, where a package is missing or its version is not known.
    """
    known = [_known(package) for package in packages or _present()]
    uninstall()
    found = tuple(one for each in known for one in _replacements(each))
    for one in found:
        setattr(import_module(one.module), one.name, one.now)
        logger.info("%s", one)
    _active.append(Installation(found))
    return _active[0]


def uninstall() -> None:
    """Undo what `install` did; nothing where it did nothing."""
    while _active:
        _active.pop().uninstall()


def _present() -> list[str]:
    present = [package for package in PACKAGES if _version(package)]
    if not present:
        raise InstallError(f"found none of the packages that are served; allowed: {', '.join(PACKAGES)}")
    return present


def _known(package: str) -> _Known:
    """Return what is known of the version of a package that is here."""
    rows = [row for row in KNOWN if row.package == package]
    if not rows:
        raise InstallError(f"package: found {package!r}, allowed {', '.join(PACKAGES)}")
    found, allowed = _version(package), ", ".join(map(str, rows))
    release = re.match(r"(\d+)\.(\d+)", found)
    numbers = (int(release[1]), int(release[2])) if release else (0, 0)
    for row in rows:
        if row.first <= numbers <= row.last:
            return row
    raise InstallError(
        f"{package}: found {found or 'none installed'}, allowed {allowed}; nothing is replaced"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _replacements(known: _Known) -> Iterator[Replacement]:
    for name, values in known.modules.items():
        try:
            module = import_module(name)
        except Exception as error:
            raise InstallError(f"{name}: it cannot be imported: {error}; nothing is replaced") from error
        for attribute, ours in values.items():
            if not hasattr(module, attribute):
                found = f"{known.package} {_version(known.package)} without {name}.{attribute}"
                raise InstallError(f"{known.package}: found {found}, allowed {known}; nothing is replaced")
            yield Replacement(name, attribute, getattr(module, attribute), ours)


def _taking_any(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that drops keywords it does not know, which are for other implementations."""
    known = frozenset(signature(function).parameters)

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **{name: keywords[name] for name in keywords if name in known})

    return call


_SCANS = {
    "selective_scan_fn": selective_scan_fn,
    "selective_state_update": selective_state_update,
    "mamba_inner_fn": mamba_inner_fn,
}
_CONVOLUTIONS = {"causal_conv1d_fn": causal_conv1d_fn, "causal_conv1d_update": causal_conv1d_update}
_LAZY = {**_SCANS, "_causal_conv1d_cache": (causal_conv1d_update, causal_conv1d_fn)}
_DECORATED = {
    "mamba_selective_scan": _taking_any(selective_scan_fn),
    "mamba_selective_state_update": _taking_any(selective_state_update),
    "mamba_inner_fn": _taking_any(mamba_inner_fn),
    "causal_conv1d_fn": _taking_any(causal_conv1d_fn),
    "causal_conv1d_update": _taking_any(causal_conv1d_update),
}
_SSD = {
    "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
}
# Of a model that asks once, when it is imported, whether all of upstream's functions are there.
_EAGER = {
    **_SSD,
    **_CONVOLUTIONS,
    "selective_state_update": ssd_state_update,
    "is_fast_path_available": True,
}
_DECORATED_SSD = {
    **{name: _DECORATED[name] for name in _CONVOLUTIONS},
    "mamba2_chunk_scan": _taking_any(mamba_chunk_scan_combined),
    "mamba2_split_conv1d_scan_combined": _taking_any(mamba_split_conv1d_scan_combined),
    "mamba2_selective_state_update": _taking_any(ssd_state_update),
}
_MODULES = "mamba_ssm.modules"
_MODELS = "transformers.models.{0}.modeling_{0}"


def _without(name: str, values: Values) -> Values:
    return {other: value for other, value in values.items() if other != name}


def _models(**values: Values) -> dict[str, Values]:
    return {_MODELS.format(model): names for model, names in values.items()}


# From the first release to the last the names are the same.
KNOWN = (
    _Known("transformers", (4, 57), (4, 57), _models(mamba=_LAZY, mamba2=_EAGER)),
    _Known(
        "transformers",
        (5, 17),
        (5, 23),
        # Falcon-Mamba's block norms delta before its projection, upstream's after it: not that block is
        # replaced, but its parts.
        _models(
            mamba=_DECORATED,
            mamba2=_DECORATED_SSD,
            falcon_mamba=_without("mamba_inner_fn", _DECORATED),
        ),
    ),
    _Known(
        "mamba_ssm",
        (2, 3),
        (2, 3),
        {
            "mamba_ssm.ops.selective_scan_interface": {
                name: _SCANS[name] for name in ("selective_scan_fn", "mamba_inner_fn")
            },
            "mamba_ssm.ops.triton.ssd_combined": _SSD,
            f"{_MODULES}.mamba_simple": {**_SCANS, **_CONVOLUTIONS},
            f"{_MODULES}.mamba2": _without("is_fast_path_available", _EAGER),
        },
    ),
)
PACKAGES = tuple(dict.fromkeys(row.package for row in KNOWN))
_active: list[Installation] = []
