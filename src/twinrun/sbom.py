"""The bill of materials of an image, in CycloneDX's JSON: every package with its origin and digests."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL

from twinrun import __version__
from twinrun.building.parcels import Parcel, sources_of, wheels_of
from twinrun.errors import RunError
from twinrun.measured import Contents, chosen_wheels
from twinrun.stack import LoadedStack, normalise

# Which of several files a lock allows was installed, nobody recorded: all of their digests stand there.
ANY_OF = "twinrun:hashes"


def bill_of_materials(contents: Contents, stack: LoadedStack, root: Path) -> str:
    """Return the bill of materials of a measured image; the same image always has the same.

    Raises:
        RunError: it is not what CycloneDX's schema allows.
    """
    text: str = JsonV1Dot6(_bom(contents, stack, root)).output_as_string(indent=1)
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if fault:
        raise RunError(
            "the bill of materials breaks its schema", place=contents.image, found=str(fault)[:300]
        )
    return text + "\n"


def _bom(contents: Contents, stack: LoadedStack, root: Path) -> Bom:
    purl = PackageURL("oci", None, contents.stack, contents.digest, {"tag": contents.lock_sha256[:12]})
    image = Component(
        type=ComponentType.CONTAINER,
        name=stack.stack.image,
        version=contents.lock_sha256[:12],
        description=stack.stack.title,
        purl=purl,
        bom_ref=str(purl),
        hashes=[_sha256(contents.digest.removeprefix("sha256:"))],
    )
    # Derived, not drawn: two builds of one image have one bill.
    serial = uuid.uuid5(uuid.NAMESPACE_URL, str(purl))
    created = datetime.datetime.fromisoformat(contents.created)
    tool = Component(type=ComponentType.APPLICATION, name="twinrun", version=__version__)
    metadata = BomMetaData(component=image, timestamp=created, tools=ToolRepository(components=[tool]))
    components = [*_system(contents, stack, root), *_python(contents, stack, root)]
    bom = Bom(components=components, serial_number=serial, metadata=metadata)
    bom.register_dependency(image, components)
    return bom


def _system(contents: Contents, stack: LoadedStack, root: Path) -> Iterator[Component]:
    """Yield the packages of the distribution; those of a base from a registry have its digest alone."""
    locked = stack.system_packages(root)
    digests = {str(package): package.sha256 for package in locked.all()} if locked else {}
    measured = contents.measured
    for name, value in measured.system_packages.items():
        version, _, arch = value.partition(" ")
        marks = {"arch": arch, "distro": f"{measured.distribution}-{measured.release}".rstrip("-")}
        purl = PackageURL("deb", measured.distribution, name, version, marks)
        found = digests.get(f"{name}={version}")
        yield _component(name, version, purl, [found] if found else [])


def _python(contents: Contents, stack: LoadedStack, root: Path) -> Iterator[Component]:
    """Yield the Python packages: locked wheels by their digests, others by the source they are built from."""
    installed = contents.measured.python_packages
    wheels = {
        parcel.name(): parcel for parcel in wheels_of(root, stack, chosen=chosen_wheels(contents, stack))
    }
    built = {normalise(parcel.name()): parcel for parcel in sources_of(root, stack)}
    for name, version in sorted(installed.items()):
        known = normalise(name)
        parcel = wheels.get(known) or _source_of(known, built)
        purl = PackageURL("pypi", None, known, version)
        digests = parcel.digests if parcel and parcel.kind != "commit" else ()
        commit = parcel.digests[0] if parcel and parcel.kind == "commit" and parcel.digests else None
        yield _component(name, version, purl, digests, commit=commit)


def _source_of(name: str, built: dict[str, Parcel]) -> Parcel | None:
    """Return what a package was built from; sources are named after repositories, such as flash-attention."""
    return next((parcel for source, parcel in built.items() if source.startswith(name)), None)


def _component(
    name: str, version: str, purl: PackageURL, digests: Iterable[str], *, commit: str | None = None
) -> Component:
    hashes = [_sha256(digest) for digest in digests]
    notes = [Property(name=ANY_OF, value="one of them is installed")] if len(hashes) > 1 else []
    notes += [Property(name="twinrun:commit", value=commit)] if commit else []
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        purl=purl,
        bom_ref=str(purl),
        hashes=hashes,
        properties=notes,
    )


def _sha256(digest: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)
