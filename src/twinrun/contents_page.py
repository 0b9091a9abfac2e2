"""The page of an image: what was measured in it, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from twinrun.measured import Contents

MEGABYTE = 1_000_000


def page(contents: Contents) -> str:
    """Return the manifest page of an image, in Markdown."""
    measured = contents.measured
    parts = [
        f"# {contents.image}",
        _where(contents),
        table(("what", "found"), facts(contents)),
        "## Labels",
        table(("label", "value"), ((f"`{name}`", value) for name, value in contents.labels.items())),
        f"## Python packages ({len(measured.python_packages)})",
        table(
            ("package", "version"), sorted(measured.python_packages.items(), key=lambda row: row[0].lower())
        ),
        f"## System packages ({len(measured.system_packages)})",
        table(("package", "version"), sorted(measured.system_packages.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _where(contents: Contents) -> str:
    if contents.measured_in is None:
        return f"Measured inside a running container of `{contents.digest}`."
    return (
        f"`{contents.digest}`, measured inside a running container of `{contents.measured_in}`,"
        " from which it differs in the source of twinrun alone."
    )


def facts(contents: Contents) -> list[tuple[str, str]]:
    """Return the rows that tell the image apart from others."""
    measured = contents.measured
    torch = dict(measured.torch)
    version = torch.pop("version", "none")
    built = ", ".join(f"{name} {value}" for name, value in torch.items())
    kernels = "; ".join(f"{name} for {', '.join(archs)}" for name, archs in measured.kernels.items())
    return [
        ("operating system", f"{measured.system}, {contents.platform}"),
        ("Python", measured.python),
        ("PyTorch", f"{version} ({built})" if built else version),
        (
            "collectives",
            ", ".join(f"{name} {value}" for name, value in measured.collectives.items()) or "none",
        ),
        ("FlashAttention", measured.python_packages.get("flash_attn", "none")),
        ("compilers", "; ".join(f"{name}: {value}" for name, value in measured.toolkit.items()) or "none"),
        ("compiled kernels", kernels or "none"),
        ("size", f"{contents.size_bytes / MEGABYTE:,.0f} MB, uncompressed"),
        ("user", measured.user),
        ("made with a clock of", contents.created),
        ("lock", f"`{contents.lock_sha256}`"),
    ]


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
