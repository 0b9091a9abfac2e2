"""SBOM of an image by CycloneDX's own library: every package with its origin, digests and licences."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Collection, Iterator, Sequence
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
from twinrun.images.inventory import ImageInventory
from twinrun.images.wheels import requirements
from twinrun.manifests.stack import LoadedStack, normalise

# Marks a component with the checksums of all files that the lock allows: which is in an image that was not
# built here is not known.
ANY_OF = "twinrun:hashes"


def sbom_json(
    inventory: ImageInventory, stack: LoadedStack, root: Path, *, used: Collection[str] = ()
) -> str:
    """Return the SBOM of an image; it depends on the inventory, the locks and the files used alone.

    Args:
        used: checksums of the wheels that the image was made of, where they are known.

    Raises:
        RunError: the SBOM does not validate against CycloneDX's schema.
    """
    from cyclonedx.validation.json import JsonStrictValidator

    tag = inventory.image.rpartition(":")[2]
    purl = PackageURL("oci", None, inventory.stack, inventory.digest, {"tag": tag})
    image = Component(
        type=ComponentType.CONTAINER,
        name=stack.stack.image,
        version=tag,
        description=stack.stack.title,
        purl=purl,
        bom_ref=str(purl),
        hashes=[_sha256(inventory.digest.removeprefix("sha256:"))],
    )
    components = [*_system(inventory, stack, root), *_python(inventory, stack, root, used)]
    tool = Component(type=ComponentType.APPLICATION, name="twinrun", version=__version__)
    bom = Bom(
        components=components,
        # Derived, not random: two builds of one image have the same SBOM.
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, str(purl)),
        metadata=BomMetaData(
            component=image,
            timestamp=datetime.datetime.fromisoformat(inventory.created),
            tools=ToolRepository(components=[tool]),
        ),
    )
    bom.register_dependency(image, components)
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    if fault := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        raise RunError(
            "the bill of materials breaks its schema", place=inventory.image, found=str(fault)[:300]
        )
    return text + "\n"


def _system(inventory: ImageInventory, stack: LoadedStack, root: Path) -> Iterator[Component]:
    """Yield the system packages with the checksums of their files."""
    locked = stack.system_packages(root)
    digests = {str(package): (package.sha256,) for package in locked.root} if locked else {}
    measured = inventory.measured
    for name, value in measured.system_packages.items():
        version, _, arch = value.partition(" ")
        qualifiers = {"arch": arch, "distro": f"{measured.distribution}-{measured.release}".rstrip("-")}
        purl = PackageURL("deb", measured.distribution, name, version, qualifiers)
        digest = digests.get(f"{name}={version}", ())
        yield _component(name, version, purl, digest, measured.system_licences.get(name, ()))


def _python(
    inventory: ImageInventory, stack: LoadedStack, root: Path, used: Collection[str]
) -> Iterator[Component]:
    """Yield the Python packages: locked wheels with their checksums, kernels of the project without."""
    entries = requirements(stack.lock(root), stack.stack)
    locked = {normalise(pin.partition("==")[0]): hashes for pin, hashes in entries.items()}
    for name, version in sorted(inventory.measured.python_packages.items()):
        hashes = locked.get(normalise(name), ())
        installed = tuple(digest for digest in hashes if digest in used) or hashes
        purl = PackageURL("pypi", None, normalise(name), version)
        yield _component(name, version, purl, installed, inventory.measured.python_licences.get(name, ()))


def _component(
    name: str, version: str, purl: PackageURL, digests: Sequence[str], licences: Sequence[str]
) -> Component:
    any_of = [Property(name=ANY_OF, value="one of them is installed")] if len(digests) > 1 else []
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        purl=purl,
        bom_ref=str(purl),
        hashes=[_sha256(digest) for digest in digests],
        properties=any_of,
        licenses=_licences(licences),
    )


def _licences(names: Sequence[str]) -> list[License]:
    """Return licences by their SPDX identifier or expression where they are one, else by name."""
    factory = LicenseFactory()
    if len(names) == 1:
        return [factory.make_from_string(names[0])]
    found: list[License] = []
    for name in names:
        # An expression stands alone in CycloneDX.
        try:
            found.append(factory.make_with_id(name))
        except InvalidSpdxLicenseException:
            found.append(factory.make_with_name(name))
    return found


def _sha256(digest: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)
