"""SBOM of an image in CycloneDX JSON: every package with its origin and checksums."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from cyclonedx.contrib.license.exceptions import InvalidSpdxLicenseException
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from packageurl import PackageURL

from twinrun import __version__
from twinrun.foundation.errors import RunError
from twinrun.images.artifacts import wheel_artifacts
from twinrun.images.inventory import ImageInventory, installed_alternatives
from twinrun.manifests.stack import LoadedStack, normalise

# Marks a component with the checksums of all files that the lock allows: which is in an image that was not
# built here is not known.
ANY_OF = "twinrun:hashes"


def sbom_json(
    inventory: ImageInventory, stack: LoadedStack, root: Path, *, used: Collection[str] = ()
) -> str:
    """Return the SBOM of an image; it depends on the inventory, the locks and the files used alone.

    Args:
        used: checksums of the files that the image was made of, where they are known.

    Raises:
        RunError: the SBOM does not validate against CycloneDX's schema.
    """
    from cyclonedx.validation.json import JsonStrictValidator

    text: str = JsonV1Dot6(_bom(inventory, stack, root, used)).output_as_string(indent=1)
    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if fault:
        raise RunError(
            "the bill of materials breaks its schema", place=inventory.image, found=str(fault)[:300]
        )
    return text + "\n"


def _bom(inventory: ImageInventory, stack: LoadedStack, root: Path, used: Collection[str]) -> Bom:
    purl = PackageURL("oci", None, inventory.stack, inventory.digest, {"tag": inventory.tag()})
    image = Component(
        type=ComponentType.CONTAINER,
        name=stack.stack.image,
        version=inventory.tag(),
        description=stack.stack.title,
        purl=purl,
        bom_ref=str(purl),
        hashes=[_sha256(inventory.digest.removeprefix("sha256:"))],
    )
    # Derived, not random: two builds of one image have the same SBOM.
    serial = uuid.uuid5(uuid.NAMESPACE_URL, str(purl))
    created = datetime.datetime.fromisoformat(inventory.created)
    tool = Component(type=ComponentType.APPLICATION, name="twinrun", version=__version__)
    metadata = BomMetaData(component=image, timestamp=created, tools=ToolRepository(components=[tool]))
    components = [*_system(inventory, stack, root), *_python(inventory, stack, root, used)]
    bom = Bom(components=components, serial_number=serial, metadata=metadata)
    bom.register_dependency(image, components)
    return bom


def _system(inventory: ImageInventory, stack: LoadedStack, root: Path) -> Iterator[Component]:
    """Yield the system packages with the checksums of their files."""
    locked = stack.system_packages(root)
    digests = {str(package): package.sha256 for package in locked.all()} if locked else {}
    measured = inventory.measured
    for name, value in measured.system_packages.items():
        version, _, arch = value.partition(" ")
        qualifiers = {"arch": arch, "distro": f"{measured.distribution}-{measured.release}".rstrip("-")}
        purl = PackageURL("deb", measured.distribution, name, version, qualifiers)
        digest = digests.get(f"{name}={version}")
        licences = measured.system_licences.get(name, ())
        yield _component(name, version, purl, [digest] if digest else [], licences)


def _python(
    inventory: ImageInventory, stack: LoadedStack, root: Path, used: Collection[str]
) -> Iterator[Component]:
    """Yield the Python packages: locked wheels with their checksums, kernels of the project without."""
    alternatives = installed_alternatives(inventory, stack)
    wheels = {
        artifact.name(): artifact for artifact in wheel_artifacts(root, stack, alternatives=alternatives)
    }
    for name, version in sorted(inventory.measured.python_packages.items()):
        artifact = wheels.get(normalise(name))
        purl = PackageURL("pypi", None, normalise(name), version)
        licences = inventory.measured.python_licences.get(name, ())
        locked = artifact.digests if artifact else ()
        installed = [digest for digest in locked if digest in used] or locked
        yield _component(name, version, purl, installed, licences)


def _component(
    name: str, version: str, purl: PackageURL, digests: Iterable[str], licences: Sequence[str]
) -> Component:
    hashes = [_sha256(digest) for digest in digests]
    properties = [Property(name=ANY_OF, value="one of them is installed")] if len(hashes) > 1 else []
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        purl=purl,
        bom_ref=str(purl),
        hashes=hashes,
        properties=properties,
        licenses=_licences(licences),
    )


def _licences(names: Sequence[str]) -> list[License]:
    """Return licences by their SPDX identifier or expression where they are one, else by name."""
    factory = LicenseFactory()
    if len(names) == 1:
        return [factory.make_from_string(names[0])]
    # An expression stands alone in CycloneDX.
    return [_named(factory, name) for name in names]


def _named(factory: LicenseFactory, name: str) -> License:
    try:
        return factory.make_with_id(name)
    except InvalidSpdxLicenseException:
        return factory.make_with_name(name)


def _sha256(digest: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)
