"""Package inventory of an image: the data, its differences from the locks, and its Markdown page."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.text import markdown_table
from twinrun.images.artifacts import wheel_artifacts
from twinrun.manifests.image_identity import COMMITTED
from twinrun.manifests.packages import AlternativePin
from twinrun.manifests.stack import LoadedStack, normalise

_MEGABYTE = 1_000_000


class PackageInventory(Frozen):
    """Output of images/contents.py in a container of the image."""

    system: str
    distribution: str
    release: str
    processor: str
    user: str
    """UID and GID of the container."""
    python: str
    toolkit: dict[str, str]
    """Compiler to its version line."""
    torch: dict[str, str]
    collectives: dict[str, str]
    kernels: dict[str, tuple[str, ...]]
    """Compiled extension to the GPU architectures of its code objects."""
    python_packages: dict[str, str]
    system_packages: dict[str, str]
    """Package to version and architecture."""
    python_licences: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Package to what its metadata names, an expression or names."""
    system_licences: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Package to the short names in its copyright file; none where that file is free text."""


class ImageInventory(Frozen):
    """One image: its identity in the engine, and the packages measured in a container of it."""

    stack: str
    image: str
    digest: str
    lock_sha256: str
    platform: str
    created: str
    size_bytes: int
    """Size of all layers, uncompressed."""
    layers: tuple[str, ...] = ()
    """`sha256:` and the checksum of each layer's tar, the lowest first."""
    labels: dict[str, str]
    measured: PackageInventory

    def tag(self) -> str:
        """Return the tag of the image."""
        return self.image.rpartition(":")[2]


def committed_inventory(root: Path, stack: LoadedStack) -> ImageInventory | None:
    """Return the committed inventory of the stack's image, None when the image was not built yet."""
    path = root / stack.folder / COMMITTED
    return load_json(path, ImageInventory) if path.is_file() else None


def installed_alternatives(inventory: ImageInventory, stack: LoadedStack) -> tuple[AlternativePin, ...]:
    """Return the alternative wheels of stack.toml that the image has in place of locked ones."""
    packages = inventory.measured.python_packages.items()
    installed = {f"{normalise(name)}=={version}" for name, version in packages}
    return tuple(pin for pin in stack.stack.alternative if pin.requirement in installed)


def differences_from_lock(inventory: ImageInventory, stack: LoadedStack, root: Path) -> list[str]:
    """Return what the image has in another version than locks and stack.toml, absent and unknown too.

    Kernels are in no lock of packages.
    """
    alternatives = installed_alternatives(inventory, stack)
    locked = {
        artifact.name(): artifact.version()
        for artifact in wheel_artifacts(root, stack, alternatives=alternatives)
    }
    locked |= {normalise(pin.package()): pin.requirement.partition("==")[2] for pin in alternatives}
    installed = {normalise(name): version for name, version in inventory.measured.python_packages.items()}
    if stack.stack.kernels:
        installed = {name: version for name, version in installed.items() if name in locked}
    return [
        *_version_differences(installed, locked),
        *_system_differences(inventory, stack, root),
        *_collective_differences(inventory, stack),
    ]


def _collective_differences(inventory: ImageInventory, stack: LoadedStack) -> list[str]:
    """Hold the version that the collective library gives of itself against the declared one."""
    declared = stack.stack.collectives
    found = declared and inventory.measured.collectives.get(declared.library)
    if declared is None or found in (None, declared.version):
        return []
    return [f"{declared.library} {found}, stack.toml has {declared.version}"]


def _system_differences(inventory: ImageInventory, stack: LoadedStack, root: Path) -> list[str]:
    system = stack.system_packages(root)
    if system is None:
        return []
    locked = {package.name: package.version for package in (*system.base, *system.runtime)}
    packages = inventory.measured.system_packages.items()
    return _version_differences({name: value.partition(" ")[0] for name, value in packages}, locked)


def _version_differences(found: dict[str, str], locked: dict[str, str]) -> list[str]:
    return [
        f"{name} {found.get(name, 'absent')}, lock has {locked.get(name, 'none')}"
        for name in sorted({*found, *locked})
        if found.get(name) != locked.get(name)
    ]


def inventory_page(inventory: ImageInventory) -> str:
    """Return the page of an image: facts, labels, packages."""
    measured = inventory.measured
    parts = [
        f"# {inventory.image}",
        f"Measured inside a running container of `{inventory.digest}`.",
        markdown_table(("what", "found"), facts(inventory)),
        "## Labels",
        markdown_table(
            ("label", "value"), ((f"`{name}`", value) for name, value in inventory.labels.items())
        ),
        f"## Python packages ({len(measured.python_packages)})",
        markdown_table(
            ("package", "version"), sorted(measured.python_packages.items(), key=lambda row: row[0].lower())
        ),
        f"## System packages ({len(measured.system_packages)})",
        markdown_table(("package", "version"), sorted(measured.system_packages.items())),
    ]
    return "\n\n".join(parts) + "\n"


def facts(inventory: ImageInventory) -> list[tuple[str, str]]:
    """Return the rows that distinguish the image from others."""
    measured = inventory.measured
    torch = dict(measured.torch)
    version = torch.pop("version", "none")
    built = ", ".join(f"{name} {value}" for name, value in torch.items())
    kernels = "; ".join(f"{name} for {', '.join(archs)}" for name, archs in measured.kernels.items())
    return [
        ("operating system", f"{measured.system}, {inventory.platform}"),
        ("Python", measured.python),
        ("PyTorch", f"{version} ({built})" if built else version),
        (
            "collectives",
            ", ".join(f"{name} {value}" for name, value in measured.collectives.items()) or "none",
        ),
        ("FlashAttention", measured.python_packages.get("flash_attn", "none")),
        ("compilers", "; ".join(f"{name}: {value}" for name, value in measured.toolkit.items()) or "none"),
        ("compiled kernels", kernels or "none"),
        ("size", f"{inventory.size_bytes / _MEGABYTE:,.0f} MB, uncompressed"),
        ("user", measured.user),
        ("made with a clock of", inventory.created),
        ("lock", f"`{inventory.lock_sha256}`"),
    ]
