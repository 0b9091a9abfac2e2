"""What must hold for every recipe and every stack; a baked template is held to the same.

Each check takes the root of a checkout and raises AssertionError, or InputError from a loader,
naming the file at fault.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tests.records import plan
from twinrun.execution.environment import package_folders
from twinrun.foundation.signatures import SUFFIX
from twinrun.images.checks import applicable
from twinrun.images.inventory import committed_inventory, differences_from_lock
from twinrun.manifests.claims import PLACEHOLDER
from twinrun.manifests.image_identity import COMMITTED
from twinrun.manifests.recipe import LoadedRecipe
from twinrun.manifests.stack import LoadedStack, load_stack, pins
from twinrun.manifests.vendor import load_gpus, load_vendors
from twinrun.planning.configuration import differences_of_plan
from twinrun.planning.project import Project
from twinrun.results.reading import read_record

HEADINGS = ("Purpose", "Command", "What is claimed", "Deviations", "What is missing", "Changelog")
# The software of publications that nobody can build whole any more, with the reason.
PUBLISHED_STACKS = "docs/reference/images.md"
# By these a rank reads the sensors of one vendor's GPUs; nothing computes with them.
SENSORS = {"nvidia-ml-py": ()}
# Triton comes with PyTorch.
FRAMEWORK = ("torch", "triton", "safetensors")
# Records are committed for good; what is longer belongs beside them, by its digest. The longest that a recipe
# makes by default, all cases of mamba-kernels at node scale, has 276,381.
RECORD_BYTES = 300_000
RECORD_NAME = re.compile(r"[a-z0-9.-]+x[0-9]+_[a-z0-9.-]+_[0-9]{4}-[0-9]{2}-[0-9]{2}(-[0-9]+)?\.json")
ENTRY_NAME = re.compile(r"[A-Za-z0-9]+([_.-][A-Za-z0-9]+)*")
LOCK_ENTRY = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)
PINNED_ENTRY = re.compile(r"[A-Za-z0-9._-]+==[^\s;]+")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}\b")
UNWRITTEN = re.compile(rf'(?:^|= "){PLACEHOLDER}\b.*', re.MULTILINE)
IMAGE_HOST = re.compile(r"://")
HOST = re.compile(r"://|\b[a-z0-9-]+\.(com|dev|io|net|org)\b", re.IGNORECASE)


def check_folder(root: Path, loaded: LoadedRecipe) -> None:
    """A recipe folder holds what a reader expects there, and nothing else."""
    known = {"recipe.toml", "published.toml", "metrics.toml", "README.md", loaded.recipe.script or "data"}
    known |= {"data", "kernels", "results", "tests", "tools"}
    for path in (root / loaded.folder).glob("[!_]*"):
        assert ENTRY_NAME.fullmatch(path.name), f"{path}: letters and digits joined by one of - _ ."
        allowed = path.name in known or path.suffix in {".csv", ".py", ".svg"}
        assert allowed, f"{path}: a recipe has {', '.join(sorted(known))}, *.csv, *.py and *.svg"


def check_hardware(root: Path, loaded: LoadedRecipe) -> None:
    """Every published GPU is a row of images/gpus.toml, and at least one claim names its hardware."""
    gpus, published = load_gpus(root), loaded.published
    named = [claim.hardware.gpu for claim in published.claim if claim.hardware]
    named += [side.gpu for claim in published.between_records for side in (claim.over, claim.under)]
    assert named, f"{loaded.folder}/published.toml: no claim names the hardware"
    for gpu in [*named, *(reference.gpu for reference in published.reference)]:
        assert gpu in gpus, f"{loaded.folder}/published.toml: {gpu} is no row of images/gpus.toml"


def check_stacks(root: Path, loaded: LoadedRecipe) -> None:
    """Current stacks belong to their vendor, and ask for the same packages, so that vendors compare."""
    stacks = {vendor: load_stack(root, name) for vendor, name in loaded.recipe.stacks.current.items()}
    for vendor, stack in stacks.items():
        fits = stack.stack.vendor == vendor
        assert fits, f"{loaded.folder}/recipe.toml: {stack.stack.name} is not for {vendor}"
    asked = [_requirements(root, stack) | SENSORS for stack in stacks.values()]
    assert all(one == asked[0] for one in asked), f"{loaded.folder}: stacks differ in requirements.in"
    table = root / PUBLISHED_STACKS
    listed = (
        re.findall(r"^\| `([^`]+)` \|", table.read_text("utf-8"), re.MULTILINE) if table.is_file() else []
    )
    for name in loaded.recipe.stacks.published:
        there = name in listed or (root / "images" / "stacks" / name).is_dir()
        assert there, f"{loaded.folder}/recipe.toml: {name} is no stack and no row of {PUBLISHED_STACKS}"


def check_published_plan(root: Path, loaded: LoadedRecipe) -> None:
    """At paper scale the recipe is the published configuration, on as many devices as claims say."""
    gpus, published = load_gpus(root), loaded.published
    named = [claim.hardware.gpu for claim in published.claim if claim.hardware]
    gpu = next(iter([*named, *(claim.over.gpu for claim in published.between_records)]))
    made = plan(loaded.folder, scale="paper", gpu=gpu, devices=0, project=Project(root))
    differences = differences_of_plan(loaded, made)
    apart = {one.field for one in differences}
    assert apart == set(loaded.published.standing), f"{loaded.folder}: not as published: {differences}"
    points = {point.id: point for point in made.points}
    for claim in loaded.published.claim:
        if claim.kind != "score" and claim.configuration:
            # It is about another run.
            continue
        place = f"{loaded.folder}/published.toml: claim {claim.id}"
        absent = {claim.point, *(claim.between or ())} - {None, *points}
        assert not absent, f"{place}: no point {sorted(absent)} at paper scale"
        if claim.point and claim.hardware:
            cards = claim.hardware.cards * gpus[claim.hardware.gpu].devices_per_card
            devices = claim.hardware.devices or cards
            world = points[claim.point].world_size
            assert world == devices, f"{place}: {devices} devices published, {world} in recipe.toml"


def check_smoke_plan(root: Path, loaded: LoadedRecipe) -> None:
    """At smoke scale the plan resolves for a machine without GPUs."""
    made = plan(loaded.folder, scale="smoke", gpu=None, project=Project(root))
    assert made.points, f"{loaded.folder}: no point at smoke scale"


def check_scripts(root: Path, loaded: LoadedRecipe) -> None:
    """Scripts import twinrun, their own folder and what their stacks lock."""
    paths = sorted((root / loaded.folder).glob("*.py"))
    kernels = package_folders(root, loaded.recipe.kernels)
    own = {path.stem for path in paths}.union(*({path.name for path in one.iterdir()} for one in kernels))
    stacks = (load_stack(root, name) for name in loaded.recipe.stacks.current.values())
    locked = {name.replace("-", "_") for stack in stacks for name in stack.locked(root)}
    for path in paths:
        foreign = (
            imported(path.read_text(encoding="utf-8"))
            - sys.stdlib_module_names
            - {"twinrun", *FRAMEWORK}
            - own
            - locked
        )
        assert not foreign, f"{path}: imports {sorted(foreign)}"


def check_readme(root: Path, loaded: LoadedRecipe) -> None:
    """The README has the fixed headings in their order, and the command that reproduces the recipe."""
    path = root / loaded.folder / "README.md"
    assert path.is_file(), f"{path}: missing"
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {loaded.recipe.title}\n"), f"{path}: does not open with the recipe's title"
    found = tuple(re.findall(r"^## (.+)$", text, re.MULTILINE))
    assert found == HEADINGS, f"{path}: headings are {found}, must be {HEADINGS}"
    assert f"invoke run {loaded.folder}\n" in text, f"{path}: the command is not there"
    version = loaded.recipe.version
    told = f"\n- {version}: " in text.partition("## Changelog")[2]
    assert told, f"{path}: the changelog has no line `- {version}: ...` for version {version} of recipe.toml"


def check_results(root: Path, loaded: LoadedRecipe) -> None:
    """Committed records agree with themselves, are of this recipe, and judged by the claims as they stand."""
    project = Project(root)
    for path in sorted((root / loaded.folder / "results").glob("[!.]*")):
        name = path.name.removesuffix(SUFFIX)
        assert RECORD_NAME.fullmatch(name), f"{path}: not <gpu>x<count>_<stack>_<date>.json"
        if name != path.name:
            # Its record is read below, and the signature with it.
            assert path.with_name(name).is_file(), f"{path}: no record of this signature"
            continue
        assert path.stat().st_size <= RECORD_BYTES, f"{path}: over {RECORD_BYTES} bytes"
        record = read_record(path, project)
        assert record.plan.recipe == loaded.recipe.name, f"{path}: a record of {record.plan.recipe}"
        assert record.points, f"{path}: no point was measured"
        clean = record.record.revision.commit and not record.record.revision.changes_sha256
        assert clean, f"{path}: commit what was changed, then run again"


def check_written(root: Path, loaded: LoadedRecipe) -> None:
    """Nothing that the template bakes for somebody to edit is left; not asked of what was just baked."""
    for name in ("recipe.toml", "published.toml", "README.md"):
        path = root / loaded.folder / name
        found = UNWRITTEN.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path}: still the template's `{found[0]}`"


RECIPE_CHECKS: tuple[Callable[[Path, LoadedRecipe], None], ...] = (
    check_folder,
    check_hardware,
    check_stacks,
    check_published_plan,
    check_smoke_plan,
    check_scripts,
    check_readme,
    check_results,
)


def check_stack_manifest(root: Path, stack: LoadedStack) -> None:
    """A stack names a vendor that exists, and what its environment takes on the disk, to refuse in time."""
    path, vendors = f"{stack.folder}/stack.toml", load_vendors(root)
    assert stack.stack.vendor in vendors, f"{path}: vendor {stack.stack.vendor} is none of {sorted(vendors)}"
    assert stack.stack.environment, f"{path}: no [environment] with disk_mib and source"


def check_lock_is_whole(root: Path, stack: LoadedStack) -> None:
    """Every requirement is pinned: locked at that version, or in the framework's own build of it."""
    path = root / stack.folder / "requirements.in"
    lines = re.findall(r"^[^#\s].*$", path.read_text(encoding="utf-8"), re.MULTILINE)
    wanted, locked = _requirements(root, stack), stack.locked(root)
    assert len(wanted) == len(lines), f"{path}: a requirement is not pinned with =="
    for name, versions in wanted.items():
        public = tuple(version.partition("+")[0] for version in locked.get(name, ()))
        assert public == versions, f"{path}: {name}=={versions} is not locked"


def check_lock_is_hashed(root: Path, stack: LoadedStack) -> None:
    """Every entry of a lock has a hash, and the lock names no host that it came from."""
    for path in filter(None, (stack.lock(root), stack.build_lock(root))):
        text = path.read_text(encoding="utf-8")
        entries = LOCK_ENTRY.split(text)[1:]
        assert entries, f"{path}: empty"
        for entry in entries:
            assert PINNED_ENTRY.match(entry), f"{path}: not pinned with ==: {entry.splitlines()[0]}"
            assert HASH.search(entry), f"{path}: no hash: {entry.splitlines()[0]}"
        found = HOST.search(text)
        assert found is None, f"{path}: names a host: {found and found[0]}"


def check_image_locks(root: Path, stack: LoadedStack) -> None:
    """The image starts from something, every system package is locked, and who says what is said."""
    place, manifest = f"{stack.folder}/image.lock", stack.stack
    assert manifest.base, f"{stack.folder}/stack.toml: no [base], so it has no image"
    image, packages = stack.image_lock(root), stack.system_packages(root)
    assert image, place
    assert packages, place
    names = {package.name for package in packages.all()}
    absent = {*manifest.packages, *manifest.build_packages} - names
    assert not absent, f"{stack.folder}/apt.lock: {sorted(absent)} of stack.toml are not locked"
    found = IMAGE_HOST.search((root / stack.folder / "apt.lock").read_text(encoding="utf-8"))
    assert found is None, f"{stack.folder}/apt.lock: names a host: {found and found[0]}"


def check_collectives(root: Path, stack: LoadedStack) -> None:
    """The library of the collectives is named, at the version that the lock has where it is locked."""
    place, named = f"{stack.folder}/stack.toml:collectives", stack.stack.collectives
    assert named, f"{place}: missing"
    contents = committed_inventory(root, stack)
    if contents and "torch" not in stack.locked(root):
        measured = contents.measured.collectives.get(named.library, "")
        assert measured == named.version, f"{place}: {named.version}, the image has {measured}"
    lock, _, entry = named.source.partition(".lock: ")
    if entry:
        packages = stack.system_packages(root)
        system = {one.name: (one.version,) for one in packages.all()} if packages else {}
        versions = (system if lock == "apt" else stack.locked(root)).get(entry, ())
        fits = any(version.startswith(named.version) for version in versions)
        assert fits, f"{place}: {named.version}, {named.source} is {versions}"


def check_kernels(root: Path, stack: LoadedStack) -> None:
    """What is compiled is compiled for an architecture that some GPU of this vendor has."""
    known = {gpu.arch for gpu in load_gpus(root).values() if gpu.vendor == stack.stack.vendor}
    for arch in stack.stack.archs:
        assert arch in known, f"{stack.folder}/stack.toml:archs: {arch} is of no GPU in images/gpus.toml"
    for folder in stack.stack.kernel_folders():
        assert (root / folder).is_dir(), f"{stack.folder}/stack.toml:kernels: no {folder}"


def check_contents(root: Path, stack: LoadedStack) -> None:
    """Committed contents are of the committed locks."""
    contents, place = committed_inventory(root, stack), f"{stack.folder}/{COMMITTED}"
    if contents:
        assert contents.stack == stack.stack.name, place
        assert contents.lock_sha256 == stack.lock_sha256, f"{place}: of other locks; build and copy anew"
        assert differences_from_lock(contents, stack, root) == [], place


def check_own_checks(root: Path, stack: LoadedStack) -> None:
    """Every image has checks that it can run."""
    names = [path.stem for path in applicable(root, stack)]
    assert "imports" in names
    assert len(names) == len(set(names))
    torch = "torch" in stack.locked(root)
    assert ({"matmul", "attention", "collective"} <= set(names)) == torch, names


STACK_CHECKS: tuple[Callable[[Path, LoadedStack], None], ...] = (
    check_stack_manifest,
    check_lock_is_whole,
    check_lock_is_hashed,
    check_image_locks,
    check_collectives,
    check_kernels,
    check_contents,
    check_own_checks,
)


@cache
def imported(source: str) -> frozenset[str]:
    """Return the top-level packages that `source` imports at any depth, relative imports left out."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found - {"__future__"})


def _requirements(root: Path, stack: LoadedStack) -> dict[str, tuple[str, ...]]:
    return pins((root / stack.folder / "requirements.in").read_text(encoding="utf-8"))
