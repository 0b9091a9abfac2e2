"""From nothing to a started container where the framework's own index is needed, against stand-ins of it.

The stack is the project's own, and so are its system packages, from the mirror. What cannot be had
everywhere is served here: wheels of the right names, tags and requirements. The stack's compiler compiles
a small kernel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from docker import DockerClient

from tests.indexes import digest_of, serving_folder, source_archive, wheel
from tests.tiny_build import SECONDS
from tests.tiny_image import loaded, make_root_file_system, write_image
from tests.tiny_stack import ROOT, commit
from twinrun.foundation.cache import cache_root
from twinrun.manifests.packages import SourcePackage
from twinrun.manifests.stack import find_stacks, load_manifest, load_stack, pins
from twinrun.planning.project import Project

pytestmark = [pytest.mark.image, pytest.mark.needs("mirror")]

# The current stack of the vendor whose wheels the framework's own index alone has.
DISTANT = {name for name, one in find_stacks(ROOT).items() if one.stack.attested}
(NAME,) = DISTANT & set(Project(ROOT).recipe("recipes/mpt7b-scaling").recipe.stacks.current.values())
STACK = load_manifest(ROOT, NAME)
TAG = "cp311-cp311-manylinux_2_28_x86_64"
# As the index has it for Linux alone.
LINUX = "platform_system == 'Linux' and platform_machine == 'x86_64'"
# A package that compiles one kernel with the stack's compiler when its wheel is built.
BACKEND = """\
import os, subprocess, zipfile
def build_wheel(folder, settings=None, metadata=None):
    archs = os.environ["TWINRUN_KERNEL_ARCHS"].split()
    files = {"made/__init__.py": "ARCHS = %r\\n" % (archs,)}
    for arch in archs:
        if arch != "cpu":
            alone = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "-nogpuinc", "-nogpulib"]
            output = ["kernel.hip", "-o", f"{arch}.hsaco"]
            subprocess.run(["clang-19", *alone, f"--offload-arch={arch}", *output], check=True)
            files[f"made/{arch}.hsaco"] = open(f"{arch}.hsaco", "rb").read()
    information = "made-1.0.dist-info"
    files[f"{information}/METADATA"] = "Metadata-Version: 2.1\\nName: made\\nVersion: 1.0\\n"
    files[f"{information}/WHEEL"] = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[f"{information}/RECORD"] = "".join(f"{path},,\\n" for path in files)
    with zipfile.ZipFile(os.path.join(folder, "made-1.0-py3-none-any.whl"), "w") as archive:
        for path, content in files.items():
            archive.writestr(zipfile.ZipInfo(path), content)
    return "made-1.0-py3-none-any.whl"
"""
# A package that the index has as source alone.
SOURCE_BACKEND = """\
import os, zipfile
def build_wheel(folder, settings=None, metadata=None):
    name, version = "{name}", "{version}"
    information = f"{{name}}-{{version}}.dist-info"
    files = {{f"{{name}}/__init__.py": f"__version__ = {{version!r}}\\n"}}
    files[f"{{information}}/METADATA"] = f"Metadata-Version: 2.1\\nName: {{name}}\\nVersion: {{version}}\\n"
    files[f"{{information}}/WHEEL"] = "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[f"{{information}}/RECORD"] = "".join(f"{{path}},,\\n" for path in files)
    with zipfile.ZipFile(os.path.join(folder, f"{{name}}-{{version}}-py3-none-any.whl"), "w") as archive:
        for path, content in files.items():
            archive.writestr(zipfile.ZipInfo(path), content)
    return f"{{name}}-{{version}}-py3-none-any.whl"
"""
OWN_BACKEND = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
KERNELS = {
    "pyproject.toml": f'{OWN_BACKEND}[project]\nname = "made"\nversion = "1.0"\n',
    "backend.py": BACKEND,
    "src/made.txt": "",
    "kernel.hip": "__attribute__((global)) void one(float *x) { x[0] = 1; }\n",
}


class StandInSite(NamedTuple):
    """A checkout on a machine whose indexes are the stand-ins."""

    root: Path
    variables: dict[str, str]

    def invoke(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a command of the checkout."""
        command = [sys.executable, "-m", "twinrun", *arguments]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("UV_", "PIP_"))}
        done = subprocess.run(
            command,
            cwd=self.root,
            env=environment | self.variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done


def write_indexes(folder: Path) -> None:
    """Write the general index and the framework's own, with what each has and the other lacks."""
    general, own = folder / "general", folder / "own"
    lines = (ROOT / STACK_FOLDER / "requirements.in", ROOT / STACK_FOLDER / "build.in")
    wanted = {name: version for path in lines for name, (version,) in pins(path.read_text("utf-8")).items()}
    local = {one.package(): one.version() for one in STACK.attested}
    sources = {source.package() for source in STACK.source}
    for name in wanted.keys() - local.keys() - sources:
        requires = ("torch<2.7.1,>=2.4", "torchvision", "helper>=1") if name == "mosaicml" else ()
        wheel(general, name, wanted[name], *requires)
    # What another vendor needs.
    wheel(general, "torch", wanted["torch"], "nvidia-nccl-cu12==2.26.2", f"triton==3.3.0 ; {LINUX}", tag=TAG)
    wheel(general, "torchvision", wanted["torchvision"], f"torch=={wanted['torch']}", tag=TAG)
    wheel(general, "triton", "3.3.0", tag=TAG)
    wheel(general, "nvidia-nccl-cu12", "2.26.2")
    wheel(general, "helper", "1.0")
    # The framework's own index has copies and newer releases of other packages too.
    wheel(own, "helper", "9.0")
    triton, version = next(name for name in local if "triton" in name), local["torch"]
    files = {
        "torch/__init__.py": f"from . import version\n__version__ = {version!r}\nclass _C: pass\n",
        "torch/version.py": "cuda = None\nhip = '6.3'\n",
        "torch/distributed/__init__.py": "def is_available():\n    return False\n",
    }
    content = {"torch": files, triton: {"triton/__init__.py": ""}}
    further = {"torch": f"{triton}=={local[triton]} ; {LINUX}", "torchvision": f"torch=={wanted['torch']}"}
    for one in STACK.attested:
        name, tag = one.package(), "-".join(one.file.removesuffix(".whl").split("-")[-3:])
        asked = [further[name]] if name in further else []
        wheel(own, name, one.version(), *asked, tag=tag, files=content.get(name))


def write_source(index: Path, source: SourcePackage) -> str:
    """Write a package that is there as source alone, and what it requires; return its wheel's digest."""
    name, _, version = source.requirement.partition("==")
    for requirement in source.requires:
        required = re.split(r"[<>=]", requirement)[0]
        if not (index / required).exists():
            wheel(index, required, "99.0")
    backend = SOURCE_BACKEND.format(name=name, version=version)
    files = {
        "pyproject.toml": f'{OWN_BACKEND}[project]\nname = "{name}"\nversion = "{version}"\n',
        "backend.py": backend,
    }
    source_archive(index, name, version, files)
    with tempfile.TemporaryDirectory() as folder:
        program = f"{backend}\nbuild_wheel({folder!r})"
        subprocess.run([sys.executable, "-c", program], check=True)
        (built,) = Path(folder).iterdir()
        return digest_of(built)


STACK_FOLDER = f"images/stacks/{NAME}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInSite]:
    folder = tmp_path_factory.mktemp("site")
    root = folder / "checkout"
    left_out = shutil.ignore_patterns("__pycache__", "kernels", "contents.json")
    for name in ("images", "recipes", "src"):
        shutil.copytree(ROOT / name, root / name, ignore=left_out)
    shutil.copyfile(ROOT / "tasks.py", root / "tasks.py")
    for kernels in STACK.kernel_folders():
        (root / kernels / "src").mkdir(parents=True)
        for name, text in KERNELS.items():
            (root / kernels / name).write_text(text, encoding="utf-8")
    # Recipes whose kernels are in no image of the stack name them all the same.
    for path in ROOT.glob("recipes/*/kernels/src"):
        (root / path.relative_to(ROOT)).mkdir(parents=True, exist_ok=True)
    # An image of this name would be the user's own.
    manifest = root / STACK_FOLDER / "stack.toml"
    text = manifest.read_text(encoding="utf-8").replace('image = "twinrun/', 'image = "twinrun-test/tiny/')
    write_indexes(folder / "served")
    for source in STACK.source:
        text = text.replace(source.wheel, write_source(folder / "served/general", source))
    for one in STACK.attested:
        text = text.replace(one.sha256, digest_of(folder / "served/own" / one.package() / one.file))
    manifest.write_text(text, encoding="utf-8")
    for lock in (root / STACK_FOLDER).glob("*.lock"):
        lock.unlink()
    commit(root)
    # System packages are known by their digests, so what this machine has of them serves too.
    (cache_root() / "packages").mkdir(parents=True, exist_ok=True)
    (folder / "cache").mkdir()
    (folder / "cache/packages").symlink_to(cache_root() / "packages")
    with serving_folder(folder / "served") as address:
        variables = {
            "PYTHONPATH": str(root / "src"),
            "TWINRUN_CACHE": str(folder / "cache"),
            "TWINRUN_INDEX": f"{address}/own",
            "UV_DEFAULT_INDEX": f"{address}/general",
            "UV_NO_CONFIG": "1",
            "UV_CACHE_DIR": str(folder / "uv"),
            "PIP_INDEX_URL": f"{address}/general",
            "PIP_CONFIG_FILE": os.devnull,
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }
        yield StandInSite(root, variables)


@pytest.fixture(scope="module")
def built(site: StandInSite, client: DockerClient) -> Iterator[dict[str, Any]]:
    """What the two commands of the guide make."""
    site.invoke("lock", "--stack", NAME)
    made = json.loads(site.invoke("build", "--vendor", STACK.vendor, "--json").stdout)
    yield made
    client.images.remove(made["built"]["id"], force=True)


def test_lock_and_build_lead_from_nothing_to_a_container(
    site: StandInSite, client: DockerClient, built: dict[str, Any]
) -> None:
    locked = load_stack(site.root, NAME)
    found = locked.locked(site.root)
    for attested in STACK.attested:
        assert found[attested.package()] == (attested.version(),)
    # The index of this machine has the hashes.
    assert (locked.unhashed(site.root), locked.attested(site.root)) == ((), ())
    for one in STACK.source:
        assert found[one.package()] == (one.requirement.partition("==")[2],)
    # Of the framework's index nothing is taken but what is named.
    assert found["helper"] == ("1.0",)
    assert not {"triton", "nvidia-nccl-cu12"} & found.keys()
    assert [layer["name"] for layer in built["built"]["layers"]] == ["base", "system", "python", "kernels"]
    program = "import made, os, torch; print(torch.__version__, torch.version.hip, os.getuid(), *made.ARCHS)"
    output = client.containers.run(
        built["built"]["id"], ["python3", "-c", program], remove=True, network_mode="none"
    )
    assert output.decode().split() == [*found["torch"], "6.3", "1000", *STACK.archs, "cpu"]
    contents = json.loads((Path(built["folder"]) / "manifest.json").read_text(encoding="utf-8"))
    compiled = {arch for archs in contents["measured"]["kernels"].values() for arch in archs}
    assert compiled == set(STACK.archs)
    assert "127.0.0.1" not in "".join(
        path.read_text(encoding="utf-8") for path in (site.root / STACK_FOLDER).glob("*.lock")
    )


def test_a_second_lock_changes_nothing(site: StandInSite, built: dict[str, Any]) -> None:
    before = {path.name: path.read_bytes() for path in (site.root / STACK_FOLDER).glob("*.lock")}
    assert site.invoke("lock", "--stack", NAME).stdout == f"{NAME}: nothing changed\n"
    assert {path.name: path.read_bytes() for path in (site.root / STACK_FOLDER).glob("*.lock")} == before
    again = json.loads(site.invoke("build", "--vendor", STACK.vendor, "--json").stdout)
    assert (again["built"]["id"], again["built"]["fresh"]) == (built["built"]["id"], False)


def test_another_image_under_the_right_tag_runs_nowhere_and_is_replaced(
    site: StandInSite, client: DockerClient, built: dict[str, Any], tmp_path: Path
) -> None:
    own, tag = built["built"]["id"], built["built"]["image"]
    labels = client.images.get(own).attrs["Config"]["Labels"]
    archive = tmp_path / "planted.tar"
    layer = make_root_file_system(tmp_path / "layer.tar")
    write_image(archive, layer=layer, name="twinrun-test/tiny/planted:1", labels=labels)
    with loaded(client, archive, "twinrun-test/tiny/planted:1"):
        planted = client.images.get("twinrun-test/tiny/planted:1")
        planted.tag(*tag.rsplit(":", 1))
        errors = site.invoke("doctor", "--stack", NAME, "--engine", "docker", code=3).stderr
        assert own in errors
        assert str(planted.id) in errors
        again = site.invoke("build", "--vendor", STACK.vendor, "--json")
        assert json.loads(again.stdout)["built"]["id"] == own
        assert f"was {planted.id}, is now {own}" in again.stderr
        assert client.images.get(tag).id == own


def test_a_changed_kernel_is_another_image(site: StandInSite, built: dict[str, Any]) -> None:
    source = site.root / "recipes" / STACK.kernels[0] / "kernels" / "kernel.hip"
    text = source.read_text(encoding="utf-8")
    source.write_text(f"{text}// changed\n", encoding="utf-8")
    try:
        assert load_stack(site.root, NAME).image() != built["built"]["image"]
        errors = site.invoke("doctor", "--stack", NAME, "--engine", "docker", code=3).stderr
        assert "the image is not on this machine" in errors
    finally:
        source.write_text(text, encoding="utf-8")


def test_without_the_index_nothing_is_half_built(site: StandInSite, built: dict[str, Any]) -> None:
    """The locks stay whole; a build without the wheels says that their index is out of reach."""
    before = {path: path.read_bytes() for path in (site.root / STACK_FOLDER).glob("*.lock")}
    gone = "http://127.0.0.1:9/own"
    empty = str(Path(site.variables["TWINRUN_CACHE"]).with_name("empty"))
    offline = site._replace(variables=site.variables | {"TWINRUN_INDEX": gone, "TWINRUN_CACHE": empty})
    assert offline.invoke("lock", "--stack", NAME, "--only", "python").stdout == f"{NAME}: nothing changed\n"
    assert {path: path.read_bytes() for path in (site.root / STACK_FOLDER).glob("*.lock")} == before
    errors = offline.invoke("build", "--vendor", STACK.vendor, code=3).stderr
    assert "the framework's package index is out of reach" in errors
