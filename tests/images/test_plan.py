"""What of an image build comes before the engine: plans, locks against files, the context, the archive."""

from __future__ import annotations

import io
import json
import random
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.goldens import check_entry, check_golden, laid_out, shortened
from tests.tiny_stack import ROOT, STACK, Checkout, digest, make_checkout, wheel
from twinrun.foundation.errors import InputError, MachineError
from twinrun.foundation.redaction import redacted
from twinrun.images.command import plan_request
from twinrun.images.context import Context, collect
from twinrun.images.plan import BuildRequest, choose_stack, plan_build
from twinrun.images.wheels import Entries, fetch_wheels
from twinrun.manifests.locks import SourcePackage
from twinrun.manifests.stack import find_stacks

STACKS = sorted(name for name, one in find_stacks(ROOT).items() if one.stack.base)
# Their plans are readable as a whole, of the others the short parts are.
WHOLE = ("cuda13.0-torch2.11", "rocm7.1-torch2.10")
CHANGES = 24


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    return make_checkout(tmp_path)


def collected(checkout: Checkout, **options: object) -> Context:
    """Do all of a build that comes before the engine is asked."""
    request = BuildRequest(vendor="cpu", stack=STACK, wheelhouse=checkout.wheelhouse, base=checkout.base)
    request = replace(request, **options)  # type: ignore[arg-type]
    plan = plan_request(checkout.root, request)
    return collect(plan, checkout.root, request, say=lambda text: None)


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
    for changing in (plan.root, loaded.inputs_sha256[:12]):
        text = text.replace(changing, "{changing}")
    if name in WHOLE:
        check_golden(f"build-{name}.json", laid_out(json.loads(text)) + "\n")
    else:
        check_entry("builds.json", name, shortened(json.loads(text)))


@pytest.mark.parametrize(
    ("vendor", "stack", "fault"),
    [
        (None, None, "which stack?"),
        ("cqu", None, "did you mean `cpu`?"),
        ("cpu", "cqu", "did you mean `cpu`?"),
        ("cpu", "rocm-debian", "another vendor"),
        ("rocm", "cpu", f"allowed: {', '.join(name for name in STACKS if name.startswith('rocm'))}"),
    ],
)
def test_names_that_do_not_fit_are_told(vendor: str | None, stack: str | None, fault: str) -> None:
    with pytest.raises(InputError) as caught:
        choose_stack(ROOT, vendor, stack)
    assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"context": Path("/new"), "push": "host/x"}, "--context: nothing is built"),
        ({"pull": f"host/x@sha256:{'0' * 64}"}, "--pull: nothing is built"),
        ({"pull": "host/x:tag", "base": None, "wheelhouse": None}, "by its digest"),
        ({"wheelhouse": Path("/none")}, "--wheelhouse: no such folder"),
        ({"base": Path("/none")}, "--base: no such file"),
        ({"base": Path(__file__)}, "not the locked root file system"),
        ({"index": "host"}, "--index: no address"),
    ],
)
def test_options_that_do_not_fit_are_refused(tiny: Checkout, options: dict[str, object], fault: str) -> None:
    with pytest.raises(InputError) as caught:
        collected(tiny, **options)
    assert fault in str(caught.value)


# Files against locks


def test_every_file_goes_where_the_dockerfile_expects_it(tiny: Checkout, tmp_path: Path) -> None:
    plan = plan_request(tiny.root, BuildRequest(stack=STACK))
    context = collected(tiny)
    folder = tmp_path / "context"
    context.write(folder, tiny.root)
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    wheels = {f"python/{name}-py3-none-any.whl" for name in ("big-2.0", "large-3.1", "pip-25.3", "small-1.0")}
    texts = {"Dockerfile", "archive.py", "build.env", "image.json"}
    # Without kernels nothing is compiled, so no package of the build stage is there.
    lists = {"python/requirements.txt", "tools/requirements.txt"}
    assert found == wheels | texts | lists | {"root.tar"}
    assert (folder / "build.env").read_text() == ("PYTHON=3.11\nARCHS=''\nSOURCE_DATE_EPOCH=1700000000\n")
    labels = (folder / "Dockerfile").read_text(encoding="utf-8").splitlines()[-len(plan.labels) :]
    assert labels == [f'LABEL {name}="{value}"' for name, value in plan.labels.items()]
    assert context.bytes_needed() > 0


def test_a_changed_byte_is_refused_before_anything_runs(tiny: Checkout, tmp_path: Path) -> None:
    draw = random.Random(1)
    for number in range(CHANGES):
        wheels = tiny.wheelhouse.glob("*.whl")
        path = draw.choice(sorted([*wheels, *tiny.wheelhouse.glob("debian/**/*.deb"), tiny.base]))
        before = path.read_bytes()
        changed = bytearray(before)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        for cached in (tmp_path / "cache").rglob("*.deb"):
            cached.unlink()
        base = tiny.base if path == tiny.base else None
        with pytest.raises((InputError, MachineError)) as caught:
            collected(tiny, base=base)
        path.write_bytes(before)
        name = path.name.partition("-")[0] if path.suffix == ".whl" else path.name
        assert name in str(caught.value), f"change {number}"


def test_what_the_index_has_is_fetched_once_and_only_as_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, cache = tmp_path / "served", tmp_path / "cache/wheels"
    served.mkdir()
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(served))
    content, other = wheel("big", "2.0"), wheel("big", "3.0")
    (served / "big-2.0-py3-none-any.whl").write_bytes(content)
    (served / "big-3.0-py3-none-any.whl").write_bytes(content[:-1] + b"!")
    stack = find_stacks(ROOT)["cpu"].stack
    said: list[str] = []

    def fetched(version: str, file: bytes) -> dict[Path, str]:
        entries: Entries = {f"big=={version}": (digest(file),)}
        return fetch_wheels(entries, lock="x.lock", wheelhouse=None, stack=stack, index=None, say=said.append)

    for _ in range(2):
        assert fetched("2.0", content) == {cache / "big-2.0-py3-none-any.whl": digest(content)}
        assert said == ["fetching 1 Python packages of x.lock, those that the cache lacks"]
    with pytest.raises(MachineError, match="as they are locked") as caught:
        fetched("3.0", other)
    assert "big==3.0" in str(caught.value.found)
    assert {path.name for path in cache.glob("*.whl")} == {"big-2.0-py3-none-any.whl"}
    # Changed on the disk, it is fetched again.
    (cache / "big-2.0-py3-none-any.whl").write_bytes(content[:-1] + b"!")
    assert fetched("2.0", content)


def test_a_package_without_a_wheel_is_built_of_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(served))
    built = wheel("raw", "1.0")
    backend = "import shutil\ndef build_wheel(folder, *_):\n    name = 'raw-1.0-py3-none-any.whl'\n"
    backend += "    open(f'{folder}/{name}', 'wb').write(open('the.whl', 'rb').read())\n    return name\n"
    project = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    source = served / "raw-1.0.tar.gz"
    files = {"pyproject.toml": project.encode(), "backend.py": backend.encode(), "the.whl": built}
    files["PKG-INFO"] = b"Metadata-Version: 2.1\nName: raw\nVersion: 1.0\n"
    with tarfile.open(source, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"raw-1.0/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    one = SourcePackage(requirement="raw==1.0", requires=(), backend=("flit==1.0",), wheel=digest(built))
    stack = find_stacks(ROOT)["cpu"].stack.model_copy(update={"source": (one,)})
    entries = {"raw==1.0": tuple(sorted((digest(source.read_bytes()), digest(built))))}
    found = fetch_wheels(entries, lock="x.lock", wheelhouse=None, stack=stack, index=None, say=print)
    assert list(found.values()) == [digest(built)]


# Secrets


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://me:p@ss@index.example:8443/t0ken/simple/", "https://index.example:8443/***"),
        ("https://index.example?key=planted", "https://index.example/***"),
        ("planted-key", "***"),
    ],
)
def test_a_log_tells_no_secret_and_of_an_index_its_host(
    address: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINRUN_INDEX", address)
    monkeypatch.setenv("SOME_TOKEN", "token-value-2")
    assert redacted("https://user:pass-word-1@host/simple, token-value-2") == "https://***@host/simple, ***"
    assert redacted(f"cannot reach {address} now") == f"cannot reach {shown} now"
