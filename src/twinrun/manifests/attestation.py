"""Hashes of wheels that committed lock files of public repositories hold, with where each was found.

A hash needs no trust in who wrote it down: the file comes over TLS from the framework's own index, and a
wrong hash can only end a build.
"""

from __future__ import annotations

from typing import Annotated

from packaging.specifiers import SpecifierSet
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from pydantic import Field, model_validator

from twinrun.foundation.manifest import Frozen

# End of a wheel's platform tag, by the processor as registries name it.
PROCESSORS = {"amd64": "x86_64", "arm64": "aarch64"}


class PublicLock(Frozen):
    """A committed file of a public repository that holds a hash."""

    repository: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+$")]
    """Owner and name on GitHub."""
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
    path: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]+$")]


class Attestation(Frozen):
    """A wheel of the framework's own index, and the hash that public lock files have of it."""

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*\.whl$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    found: Annotated[tuple[PublicLock, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _consistent(self) -> Attestation:
        try:
            parse_wheel_filename(self.file)
        except InvalidWheelFilename as error:
            raise ValueError(str(error)) from None
        repositories = [one.repository for one in self.found]
        if len(repositories) != len(set(repositories)):
            raise ValueError(f"`{self.file}` is found twice in one repository, which is one witness")
        return self

    def __str__(self) -> str:
        """Return file, hash and origins in one line."""
        where = ", ".join(f"{one.repository}@{one.commit[:12]}:{one.path}" for one in self.found)
        return f"attested  {self.file}  sha256:{self.sha256}  {where}"

    def package(self) -> str:
        """Return the name of the package, normalised."""
        return str(parse_wheel_filename(self.file)[0])

    def version(self) -> str:
        """Return the version, with its local label."""
        return str(parse_wheel_filename(self.file)[1])

    def requirement(self) -> str:
        """Return package and version as a lock has them."""
        return f"{self.package()}=={self.version()}"

    def pythons(self) -> set[str]:
        """Return the interpreters that the wheel is for, for example `3.11`; empty where it is for any."""
        tags = {tag.interpreter for tag in parse_wheel_filename(self.file)[3]}
        return {f"{one[2]}.{one[3:]}" for one in tags if one.startswith("cp") and one[3:]}

    def processors(self) -> set[str]:
        """Return the ends of its platform tags, for example `x86_64`; `any` where it has no compiled part."""
        tags = {tag.platform for tag in parse_wheel_filename(self.file)[3]}
        known = PROCESSORS.values()
        return {next((name for name in known if tag.endswith(name)), tag) for tag in tags}


def check_attestations(attested: tuple[Attestation, ...], *, python: str, platform: str) -> None:
    """Hold the wheels of a stack against each other and against what the stack runs on.

    Args:
        python: specifier of the stack's interpreters.
        platform: operating system and processor as registries name them.

    Raises:
        ValueError: the first contradiction, in words.
    """
    files = [one.file for one in attested]
    if twice := next((file for file in files if files.count(file) > 1), None):
        raise ValueError(f"`{twice}` has two hashes")
    versions: dict[str, str] = {}
    for one in attested:
        if (other := versions.setdefault(one.package(), one.version())) != one.version():
            raise ValueError(
                f"`{one.file}` is version {one.version()}, another wheel of the package is {other}"
            )
    architecture = platform.partition("/")[2]
    if attested and architecture not in PROCESSORS:
        raise ValueError(f"wheels are attested for {' or '.join(PROCESSORS)}, the platform is `{platform}`")
    processor = PROCESSORS.get(architecture, architecture)
    interpreters = SpecifierSet(python)
    for one in attested:
        if wrong := sorted(name for name in one.pythons() if name not in interpreters):
            raise ValueError(f"`{one.file}` is for Python {', '.join(wrong)}, the stack runs on {python}")
        if not one.processors() <= {processor, "any"}:
            raise ValueError(
                f"`{one.file}` is for {', '.join(sorted(one.processors()))}, not for {processor}"
            )
