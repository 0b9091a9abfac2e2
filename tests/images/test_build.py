"""What of an image build comes before the engine: plans, locks against files, and what a log tells."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.goldens import check_entry, check_golden, laid_out, shortened
from tests.tiny_stack import ROOT, STACK, Checkout, digest, make_checkout, wheel
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.text import redacted
from twinrun.images.artifact_cache import download_wheels, find_alternatives
from twinrun.images.artifacts import Artifact, wheel_artifacts
from twinrun.images.command import BuildRequest, check_verified, plan_request
from twinrun.images.context import fetch_artifacts, write_context
from twinrun.images.plan import choose_stack, plan_build
from twinrun.manifests.packages import SourcePackage
from twinrun.manifests.stack import find_stacks

STACKS = sorted(name for name, one in find_stacks(ROOT).items() if one.stack.base)
# Their plans are readable as a whole, of the others the short parts are.
WHOLE = ("cuda13.0-torch2.11", "rocm7.1-torch2.10")
CHANGES = 200


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    return make_checkout(tmp_path)


def verify(checkout: Checkout, **options: object) -> dict[str, list[Path]]:
    """Do all of a build that comes before the engine is asked."""
    request = BuildRequest(
        vendor="cpu", stack=STACK, wheelhouse=checkout.wheelhouse, base=checkout.base
    ).model_copy(update=options)
    plan = plan_request(checkout.root, request)
    check_verified(plan, request)
    return fetch_artifacts(plan, root=checkout.root, wheelhouse=request.wheelhouse, say=lambda text: None)


# Plans


@pytest.mark.parametrize("name", STACKS)
def test_the_plan_is_the_golden_one(name: str) -> None:
    loaded = find_stacks(ROOT)[name]
    plan = plan_build(ROOT, loaded)
    summary = plan.summary()
    assert isinstance(summary["files"], dict)
    # A lock that is resolved again, or a change of the source, leaves the rest of a plan as it is.
    summary["files"] = sorted(summary["files"])
    summary["labels"] = sorted(plan.labels)
    text = json.dumps(summary)
    for changing in (plan.base, plan.base[:12], loaded.inputs_sha256[:12], str(plan.epoch)):
        text = text.replace(changing, "{changing}")
    if name in WHOLE:
        check_golden(f"build-{name}.json", laid_out(json.loads(text)) + "\n")
    else:
        check_entry("builds.json", name, shortened(json.loads(text)))


@pytest.mark.parametrize(
    ("vendor", "stack", "fault"),
    [
        ("cqu", None, "did you mean `cpu`?"),
        ("cpu", "cqu", "did you mean `cpu`?"),
        ("cpu", "rocm-debian", "another vendor"),
    ],
)
def test_names_that_do_not_fit_are_told(vendor: str, stack: str | None, fault: str) -> None:
    with pytest.raises(InputError) as caught:
        choose_stack(ROOT, vendor, stack)
    assert fault in str(caught.value)


def test_a_stack_names_its_vendor_and_a_vendor_the_stack_of_the_recipes() -> None:
    assert choose_stack(ROOT, None, "rocm-debian").stack.vendor == "rocm"
    assert choose_stack(ROOT, "rocm", "rocm-debian") == choose_stack(ROOT, None, "rocm-debian")
    assert choose_stack(ROOT, "cpu", None).stack.name == "cpu"


def test_a_build_of_no_stack_names_what_is_allowed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twinrun", "build"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "--stack: which stack?" in done.stderr
    assert "rocm-debian" in done.stderr
    assert "or --vendor" in done.stderr


def test_a_stack_of_another_vendor_is_refused_with_the_vendors_own() -> None:
    with pytest.raises(InputError) as caught:
        choose_stack(ROOT, "rocm", "cpu")
    assert caught.value.allowed == [name for name in STACKS if name.startswith("rocm")]


def test_a_stale_lock_is_refused(tiny: Checkout) -> None:
    requirements = tiny.root / "images/stacks" / STACK / "requirements.in"
    requirements.write_text("small==1.1\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"does not belong to requirements.in"):
        verify(tiny)


def test_an_unverified_pin_is_refused_unless_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    pin = '\n[[unverified]]\nrequirement = "hidden==1.0+local"\nsource = "hearsay"\n'
    checkout = make_checkout(tmp_path, extra=pin)
    (checkout.wheelhouse / "hidden-1.0+local-py3-none-any.whl").write_bytes(wheel("hidden", "1.0+local"))
    with pytest.raises(InputError, match="nobody could verify") as caught:
        verify(checkout)
    assert "hidden==1.0+local" in str(caught.value)
    files = verify(checkout, allow_unverified=True)
    assert "hidden-1.0+local-py3-none-any.whl" in {path.name for path in files["python"]}


# Files against locks


def test_every_file_goes_where_the_dockerfile_expects_it(tiny: Checkout, tmp_path: Path) -> None:
    files = verify(tiny) | {"base": [tiny.base]}
    plan = plan_request(tiny.root, BuildRequest(vendor="cpu", stack=STACK))
    folder = tmp_path / "context"
    folder.mkdir()
    write_context(plan, folder, root=tiny.root, files=files)
    assert (folder / "base.tar").read_bytes() == tiny.base.read_bytes()
    assert {path.name for path in (folder / "python").iterdir()} == {
        *("requirements.txt", "big-2.0-py3-none-any.whl"),
        *("large-3.1-py3-none-any.whl", "small-1.0-py3-none-any.whl"),
    }
    assert [len(list((folder / "packages" / stage).iterdir())) for stage in ("runtime", "build")] == [1, 1]
    mounted = set((folder / "Dockerfile").read_text(encoding="utf-8").split("source=")[1:])
    wanted = {part.partition(",")[0] for part in mounted} - {"/", "/opt/twinrun/python"}
    assert all((folder / name).is_dir() for name in wanted)


def change_a_byte(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    content[place] = (content[place] + draw.randrange(1, 256)) % 256
    path.write_bytes(content)


def test_a_changed_byte_is_refused_before_anything_runs(tiny: Checkout) -> None:
    """Of every lock, every package and the base; and the error says which."""
    verify(tiny)
    locks = (tiny.root / "images/stacks" / STACK).glob("*.lock")
    files = sorted({*locks, *tiny.wheelhouse.iterdir(), tiny.base})
    draw = random.Random(2)
    for number in range(CHANGES):
        path = files[number % len(files)]
        before = path.read_bytes()
        change_a_byte(path, draw)
        with pytest.raises(InputError) as caught:
            verify(tiny)
        path.write_bytes(before)
        assert path.name in str(caught.value), f"change {number}"
    verify(tiny)


def test_a_changed_file_in_the_cache_counts_as_absent(tiny: Checkout, tmp_path: Path) -> None:
    verify(tiny)
    package = next((tmp_path / "cache/packages").glob("*.deb"))
    package.write_bytes(b"something else")
    files = verify(tiny)
    assert digest(package.read_bytes()) == package.stem
    assert package in [path for paths in files.values() for path in paths]


def test_a_missing_package_is_named(tiny: Checkout) -> None:
    for name, entry in (("large-3.1-py3-none-any.whl", "large==3.1"), ("libc6_1.0_amd64.deb", "libc6=1.0")):
        content = (tiny.wheelhouse / name).read_bytes()
        (tiny.wheelhouse / name).unlink()
        with pytest.raises(InputError) as caught:
            verify(tiny)
        assert f"{entry} is missing" in str(caught.value)
        (tiny.wheelhouse / name).write_bytes(content)


def test_two_versions_of_a_package_are_both_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image and what builds its source may need a package in two versions, which pip refuses at once."""
    served, folder = tmp_path / "served", tmp_path / "fetched"
    served.mkdir()
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(served))
    artifacts = []
    for lock, name, version in (("requirements.lock", "big", "2.0"), ("build.lock", "big", "3.0")):
        content = wheel(name, version)
        (served / f"{name}-{version}-py3-none-any.whl").write_bytes(content)
        entry, digests = f"{name}=={version}", (digest(content),)
        artifacts.append(Artifact(lock=lock, entry=entry, kind="wheel", folder="python", digests=digests))
    # In both locks the same, and one whose hash nobody knows.
    small = wheel("small", "1.0")
    (served / "small-1.0-py3-none-any.whl").write_bytes(small)
    artifacts += [
        Artifact(lock=lock, entry="small==1.0", kind="wheel", folder="python", digests=(digest(small),))
        for lock in ("requirements.lock", "build.lock")
    ]
    artifacts.append(Artifact(lock="stack.toml", entry="big==2.0", kind="wheel", folder="python", digests=()))
    download_wheels(artifacts, folder, stack=find_stacks(ROOT)["cpu"].stack)
    assert {path.name for path in folder.iterdir()} == {path.name for path in served.iterdir()}


def test_a_package_without_a_wheel_is_built_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = wheel("small", "1.0", files={"small.py": "from_source = True\n"})
    backend = (
        "import os, pathlib\n"
        "def build_wheel(folder, config_settings=None, metadata_directory=None):\n"
        "    assert os.environ['SOURCE_DATE_EPOCH'] == '1577836800', 'no time of its own'\n"
        f"    pathlib.Path(folder, 'small-1.0-py3-none-any.whl').write_bytes({built!r})\n"
        "    return 'small-1.0-py3-none-any.whl'\n"
    )
    table = "[build-system]\nrequires = []\nbuild-backend = 'backend'\nbackend-path = ['.']\n"
    source = tmp_path / "small-1.0.tar.gz"
    with tarfile.open(source, "w:gz") as archive:
        named = (
            ("backend.py", backend),
            ("pyproject.toml", table),
            ("PKG-INFO", "Name: small\nVersion: 1.0\n"),
        )
        for name, text in named:
            entry = tarfile.TarInfo(f"small-1.0/{name}")
            entry.size = len(text.encode())
            archive.addfile(entry, io.BytesIO(text.encode()))
    pinned = SourcePackage(requirement="small==1.0", requires=(), backend=(), wheel=digest(built))
    stack = find_stacks(ROOT)["cpu"].stack.model_copy(update={"source": (pinned,)})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    digests = (digest(source.read_bytes()), digest(built))
    artifact = Artifact(lock="", entry="small==1.0", kind="wheel", folder="python", digests=digests)
    folder = tmp_path / "fetched"
    folder.mkdir()
    download_wheels([artifact], folder, stack=stack)
    (found,) = folder.iterdir()
    assert artifact.accepts(digest(found.read_bytes()))
    changed = artifact.model_copy(update={"digests": (digest(built), digest(b"another source"))})
    with pytest.raises(MachineError, match="cannot be fetched"):
        download_wheels([changed], folder, stack=stack)


def test_a_second_hand_wheel_takes_the_place_of_the_locked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    slim = wheel("big", "2.0+slim")
    extra = (
        f'\n[[alternative]]\nrequirement = "big==2.0+slim"\nsha256 = "{digest(slim)}"\n'
        'replaces = ["lar*"]\nsource = "hearsay"\n'
    )
    checkout = make_checkout(tmp_path, extra=extra)
    assert {path.name for path in verify(checkout)["python"]} >= {"big-2.0-py3-none-any.whl"}
    (checkout.wheelhouse / "big-2.0+slim-py3-none-any.whl").write_bytes(slim)
    with pytest.raises(InputError, match="nobody could verify"):
        verify(checkout)
    names = {path.name for path in verify(checkout, allow_unverified=True)["python"]}
    assert names == {"big-2.0+slim-py3-none-any.whl", "small-1.0-py3-none-any.whl"}
    (checkout.wheelhouse / "big-2.0+slim-py3-none-any.whl").write_bytes(wheel("big", "2.0+other"))
    with pytest.raises(InputError, match="is not the locked file"):
        verify(checkout, allow_unverified=True)


def test_the_processor_wheel_is_known_by_its_name_and_taken_by_its_digest(tmp_path: Path) -> None:
    stack = find_stacks(ROOT)["cpu"].stack
    (pin,) = stack.alternative
    content = wheel("torch", "2.7.1+cpu")
    # As the framework's own index calls it.
    (tmp_path / "torch-2.7.1+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").write_bytes(content)
    with pytest.raises(InputError, match="is not the locked file") as caught:
        find_alternatives(stack, tmp_path)
    assert pin.sha256 in str(caught.value)
    known = pin.model_copy(update={"sha256": digest(content)})
    assert find_alternatives(stack.model_copy(update={"alternative": (known,)}), tmp_path) == (known,)


def test_the_processor_wheel_leaves_the_gpu_packages_out() -> None:
    loaded = find_stacks(ROOT)["cpu"]
    usual = {artifact.name(): artifact for artifact in wheel_artifacts(ROOT, loaded)}
    (pin,) = loaded.stack.alternative
    slim = {artifact.name(): artifact for artifact in wheel_artifacts(ROOT, loaded, alternatives=(pin,))}
    assert slim["torch"].digests == (pin.sha256,)
    assert pin.sha256 not in usual["torch"].digests
    gone = usual.keys() - slim.keys()
    assert "triton" in gone
    assert all(name == "triton" or name.startswith("nvidia-") for name in gone)


# Secrets


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (lambda secret: f"fetching https://user:{secret}@host/simple", "pass-word-1"),
        (lambda secret: f"header {secret} was refused", "token-value-2"),
    ],
)
def test_a_log_tells_no_secret(
    text: Callable[[str], str], secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "token-value-2")
    assert secret not in redacted(text(secret))
    assert "***" in redacted(text(secret))


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://index.example/simple", "https://index.example/***"),
        ("https://me:p@ss@index.example:8443/t0ken/simple/", "https://index.example:8443/***"),
        ("https://index.example?key=planted", "https://index.example/***"),
        ("https://index.example/", "https://index.example"),
        ("planted-key", "***"),
    ],
)
def test_a_log_names_the_host_of_an_index_and_no_more_of_its_address(
    address: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINRUN_INDEX", address)
    assert redacted(f"cannot reach {address} now") == f"cannot reach {shown} now"
