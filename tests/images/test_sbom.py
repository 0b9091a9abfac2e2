"""Bills of materials of every stack, from contents that are what its locks say."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest
from packageurl import PackageURL

from twinrun.images.inventory import ImageInventory, PackageInventory, differences_from_lock
from twinrun.images.sbom import sbom_json
from twinrun.images.wheels import image_packages, requirements
from twinrun.manifests.stack import LoadedStack, find_stacks, normalise

ROOT = Path(__file__).resolve().parents[2]
STACKS = {name: stack for name, stack in find_stacks(ROOT).items() if stack.stack.base}


def contents_of(stack: LoadedStack, *, only: Collection[str] | None = None) -> ImageInventory:
    """Return the contents of an image that has every locked package, or `only` some, and nothing else."""
    system = stack.system_packages(ROOT)
    assert system is not None
    wheels = image_packages(ROOT, stack)
    installed = {one.name: f"{one.version} amd64" for one in system.root}
    measured = PackageInventory(
        system="Debian",
        distribution="debian",
        release="13",
        processor="x86_64",
        user="1000:1000",
        python="3.13.5",
        toolkit={},
        torch={},
        collectives={},
        kernels={},
        python_packages={name: wheels[name] for name in wheels if only is None or name in only},
        system_packages={name: installed[name] for name in installed if only is None or name in only},
    )
    return ImageInventory(
        stack=stack.stack.name,
        image=stack.image(),
        digest=f"sha256:{'0' * 64}",
        lock_sha256=stack.lock_sha256,
        platform="linux/amd64",
        created="2026-11-20T02:11:10Z",
        size_bytes=1_237_000_000,
        labels={},
        measured=measured,
    )


def locked(stack: LoadedStack) -> dict[str, tuple[str, ...]]:
    """Return the hashes of each Python package of the image."""
    entries = requirements(stack.lock(ROOT), stack.stack)
    return {normalise(pin.partition("==")[0]): hashes for pin, hashes in entries.items()}


@pytest.mark.parametrize("name", STACKS)
def test_what_is_locked_has_a_url_and_its_digests_and_no_difference(name: str) -> None:
    stack = STACKS[name]
    contents = contents_of(stack)
    assert differences_from_lock(contents, stack, ROOT) == []
    bill = json.loads(sbom_json(contents, stack, ROOT))
    digests = {
        PackageURL.from_string(part["purl"]).name: {entry["content"] for entry in part.get("hashes", ())}
        for part in bill["components"]
    }
    wheels, system = locked(stack), stack.system_packages(ROOT)
    assert system is not None
    for name, hashes in wheels.items():
        assert digests[name] == set(hashes)
    for package in system.root:
        assert package.sha256 in digests[package.name]
    assert len(bill["components"]) == len(wheels) + len(contents.measured.system_packages)
    references = [part["bom-ref"] for part in bill["components"]]
    assert sorted(references) == sorted(set(references))
    assert bill["metadata"]["timestamp"] == "2026-11-20T02:11:10+00:00"


def test_of_several_files_the_one_that_was_used_is_named() -> None:
    stack = STACKS["cpu"]
    wheels = locked(stack)
    used = [hashes[-1] for hashes in wheels.values()]
    bill = json.loads(sbom_json(contents_of(stack, only=wheels), stack, ROOT, used=used))
    parts = [part for part in bill["components"] if part["purl"].startswith("pkg:pypi/")]
    found = [entry["content"] for part in parts for entry in part["hashes"]]
    assert found == [wheels[name][-1] for name in sorted(wheels)]
    assert not [part for part in parts if "properties" in part]


def test_another_collective_library_than_declared_is_a_difference() -> None:
    stack = STACKS["rocm-debian"]
    contents = contents_of(stack)
    ran = contents.measured.model_copy(update={"collectives": {"RCCL": "5.4.3"}})
    found = differences_from_lock(contents.model_copy(update={"measured": ran}), stack, ROOT)
    assert found == ["RCCL 5.4.3, stack.toml has 2.13.4"]
    same = contents.measured.model_copy(update={"collectives": {"RCCL": "2.13.4"}})
    assert differences_from_lock(contents.model_copy(update={"measured": same}), stack, ROOT) == []


def test_licences_are_identifiers_expressions_or_names() -> None:
    contents = contents_of(STACKS["cpu"], only=("numpy", "pydantic", "packaging", "bash", "coreutils"))
    named = {
        "numpy": ("BSD-3-Clause AND 0BSD",),
        "pydantic": ("MIT",),
        "packaging": ("Apache Software License", "BSD-3-Clause"),
    }
    measured = contents.measured.model_copy(
        update={"python_licences": named, "system_licences": {"bash": ("GPL-3+",)}}
    )
    bill = json.loads(sbom_json(contents.model_copy(update={"measured": measured}), STACKS["cpu"], ROOT))
    found = {part["name"].lower(): part.get("licenses") for part in bill["components"]}
    assert found["numpy"] == [{"expression": "BSD-3-Clause AND 0BSD"}]
    assert found["pydantic"] == [{"license": {"id": "MIT"}}]
    names = [{"license": {"id": "BSD-3-Clause"}}, {"license": {"name": "Apache Software License"}}]
    assert sorted(found["packaging"], key=str) == sorted(names, key=str)
    assert found["bash"] == [{"license": {"name": "GPL-3+"}}]
    assert found["coreutils"] is None
