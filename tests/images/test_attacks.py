"""Manifests, locks and kernels that would be code: each is refused with its place, and nothing is touched."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.indexes import MANIFEST, digest_of
from tests.tiny_stack import commit
from twinrun.foundation.cache import tracked_files, tree_sha256
from twinrun.foundation.errors import InputError
from twinrun.images.resolution import resolve_python
from twinrun.manifests.image_identity import record_built
from twinrun.manifests.locks import load_image_lock
from twinrun.manifests.stack import load_manifest, load_stack, stamp

OPTION = "-oAPT::Update::Pre-Invoke::=touch /planted"
# Key of stack.toml to values that are no name.
NAMES = {
    "name": ["../../../victim", "-x", "", "a/b", "small\n", ".", ".."],
    "vendor": ["../cpu", "-x", "cpu;id"],
    "image": ["--privileged", "a b", "Upper/Case", "x:tag", "x@sha256:0", "https://host/x", "../x"],
    "title": ["two\nlines", "\x1b[2J", ""],
    "python": [">=3.11; touch /planted", "$(id)", "`id`"],
    "platform": ["linux/amd64 --network=host", "linux/../amd64", "windows/amd64"],
}
LISTS = {
    "kernels": ["../..", "/etc", "-x", "a/b", "", ".", "mamba-kernels/../.."],
    "packages": [OPTION, "a b", "./x.deb", "/tmp/x.deb", "g++=1.0", "a/bookworm", "?name(x)", "~nx", "x,y"],
    "build_packages": [OPTION, "../x", "$(id)", "python3*"],
    "archs": ["gfx90a --save-temps", "-x", "$(id)", "sm_80;id", "a b"],
    "replaces": ["[", "../*", "-x", "a b"],
}
TABLES = [
    ('[base]\nsuite = "bookworm --hook-dir=/x"\n', "base"),
    ('[base]\nsuite = "../../x"\n', "base"),
    ('[base]\nsuite = "jammy"\n', "base"),
    ('[base]\nsuite = "bookworm"\ntag = "1"\n', "base"),
    ('[base]\nkind = "registry"\nsuite = "bookworm"\n', "base"),
    ('[base]\nsuite = "bookworm"\nrepository = "docker.io/some/base"\n', "base"),
    ('[[sources]]\nname = "../../../victim"\nrepository = "ext::sh -c id"\n', "sources"),
    ('[[sources]]\nname = "x"\npackage = "x"\nversion = "1"\nvariables = { "A=$(id)" = "b" }\n', "sources"),
    ('[[lifted]]\nrequirement = "torch @ file:///etc"\nbecause = "x"\n', "lifted"),
    ('[[lifted]]\nrequirement = "torch==1.0\\n-r /etc/passwd"\nbecause = "x"\n', "lifted"),
    ('[[unverified]]\nrequirement = "torch==1.0"\nsource = "x"\n', "unverified"),
    ('hooks = ["id"]\n', "hooks"),
]
REQUIREMENTS = [
    "-r /etc/passwd",
    "--index-url http://host.invalid/simple",
    "-e .",
    "./local",
    "alpha @ file:///tmp/alpha",
    "alpha @ git+ssh://-oProxyCommand=id/x",
    "alpha==1.0 --config-settings=x=y",
    "alpha==1.0 \\",
    "alpha>=1.0",
    "alpha==1.*",
    "  -c constraints.txt",
    "${HOME}==1.0",
    "file:///tmp/alpha-1.0.tar.gz",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "images/stacks/small"
    folder.mkdir(parents=True)
    (folder / "requirements.in").write_text("alpha==1.0\n", encoding="utf-8")
    (folder / "stack.toml").write_text(MANIFEST, encoding="utf-8")
    return folder


def keys() -> list[tuple[str, str]]:
    """Return each manifest that would be code, and its key."""
    lines = MANIFEST.splitlines(keepends=True)
    kept = {key: "".join(one for one in lines if not one.startswith(f"{key} =")) for key in NAMES}
    named = [(f"{kept[key]}{key} = {json.dumps(one)}\n", key) for key in NAMES for one in NAMES[key]]
    lists = [(f"{MANIFEST}{key} = [{json.dumps(one)}]\n", key) for key in LISTS for one in LISTS[key]]
    return [*named, *lists, *((MANIFEST + text, key) for text, key in TABLES)]


@pytest.mark.parametrize(("text", "key"), keys())
def test_a_manifest_that_would_be_code_is_refused(folder: Path, text: str, key: str) -> None:
    (folder / "stack.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_manifest(folder.parents[2], "small")
    assert f"stack.toml:{key}" in str(caught.value.place)


@pytest.mark.parametrize("line", REQUIREMENTS)
def test_a_requirement_that_is_no_pin_does_not_reach_the_resolver(folder: Path, line: str) -> None:
    path = folder / "requirements.in"
    path.write_text(f"# why\n{line}\n", encoding="utf-8")
    with pytest.raises(InputError, match="not a pinned package") as caught:
        resolve_python(path, load_manifest(folder.parents[2], "small"))
    assert str(caught.value.place) == f"{path}:2"


@pytest.mark.parametrize("base", ["../../../x", "0" * 63, "Z" * 64, ""])
def test_a_base_that_is_no_digest_is_refused(folder: Path, base: str) -> None:
    (folder / "image.lock").write_text(f'epoch = 1\nroot = "{base}"\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"image\.lock:root"):
        load_image_lock(folder)


@pytest.mark.parametrize("name", ["../stacks/small", "../../outside", "/etc", "-x", "small/../small", "."])
def test_a_stack_is_a_folder_of_its_own_name(folder: Path, name: str) -> None:
    outside = folder.parents[2] / "outside"
    outside.mkdir()
    (outside / "stack.toml").write_text(MANIFEST, encoding="utf-8")
    with pytest.raises(InputError):
        load_manifest(folder.parents[2], name)


# What goes into an image of the checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    kernels = tmp_path / "checkout/recipes/made/kernels"
    (kernels / "src").mkdir(parents=True)
    (kernels / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    (kernels / "src/made.py").write_text("", encoding="utf-8")
    return tmp_path / "checkout"


FOLDER = "recipes/made/kernels"


def test_only_what_git_tracks_goes_in(checkout: Path) -> None:
    commit(checkout)
    before = tree_sha256(checkout, FOLDER)
    (checkout / FOLDER / ".env").write_text("PASSWORD=1\n", encoding="utf-8")
    (checkout / FOLDER / "src/notes.txt").write_text("mine\n", encoding="utf-8")
    assert [path.name for path in tracked_files(checkout, FOLDER)] == ["pyproject.toml", "made.py"]
    assert tree_sha256(checkout, FOLDER) == before
    (checkout / FOLDER / "src/made.py").write_text("changed = 1\n", encoding="utf-8")
    assert tree_sha256(checkout, FOLDER) != before


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("name", ["src/made.py", "src"])
def test_a_link_in_the_place_of_a_file_or_folder_is_refused(
    checkout: Path, tmp_path: Path, name: str, tracked: bool
) -> None:
    path, outside = checkout / FOLDER / name, tmp_path / "outside"
    if tracked:
        commit(checkout)
    path.rename(outside)
    path.symlink_to(outside)
    if not tracked:
        commit(checkout)
    with pytest.raises(InputError, match="a link cannot go into an image"):
        tracked_files(checkout, FOLDER)


def test_what_git_does_not_know_is_refused_and_a_pattern_is_no_folder(checkout: Path) -> None:
    with pytest.raises(InputError, match="git"):
        tracked_files(checkout, FOLDER)
    commit(checkout)
    with pytest.raises(InputError, match="git tracks no file there"):
        tracked_files(checkout, "recipes/*/kernels")
    subprocess.run(["git", "rm", "-r", "--cached", "--quiet", FOLDER], cwd=checkout, check=True)
    with pytest.raises(InputError, match="git tracks no file there"):
        tracked_files(checkout, FOLDER)


# Which image a tag means


def test_an_image_is_known_by_its_id_and_not_by_its_tag(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINRUN_CACHE", str(tmp_path / "cache"))
    entry = f"alpha==1.0 \\\n    --hash=sha256:{digest_of(folder / 'stack.toml')}\n"
    text = f"{stamp(folder / 'requirements.in')}\n{entry}"
    (folder / "requirements.lock").write_text(text, encoding="utf-8")
    stack, own, other = load_stack(tmp_path, "small"), f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"
    assert "no image that was built here or is committed" in str(stack.wrong_image(other))
    record_built(stack.image(), own)
    assert stack.wrong_image(own) is None
    message = str(stack.wrong_image(other))
    assert own in message
    assert other in message
    committed = f'{{"image": "{stack.image()}", "digest": "{other}"}}'
    (folder / "contents.json").write_text(committed, encoding="utf-8")
    assert load_stack(tmp_path, "small").wrong_image(other) is None
    (folder / "contents.json").write_text(committed.replace("small:", "small:0"), encoding="utf-8")
    assert load_stack(tmp_path, "small").wrong_image(other)
