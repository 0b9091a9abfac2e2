"""Package inventory of an image as a Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinrun.images.inventory.inventory import ImageInventory

_MEGABYTE = 1_000_000


def inventory_page(inventory: ImageInventory) -> str:
    """Return the page of an image: facts, labels, packages."""
    measured = inventory.measured
    parts = [
        f"# {inventory.image}",
        f"Measured inside a running container of `{inventory.digest}`.",
        table(("what", "found"), facts(inventory)),
        "## Labels",
        table(("label", "value"), ((f"`{name}`", value) for name, value in inventory.labels.items())),
        f"## Python packages ({len(measured.python_packages)})",
        table(
            ("package", "version"), sorted(measured.python_packages.items(), key=lambda row: row[0].lower())
        ),
        f"## System packages ({len(measured.system_packages)})",
        table(("package", "version"), sorted(measured.system_packages.items())),
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
