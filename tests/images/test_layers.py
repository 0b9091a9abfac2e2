"""What a build makes without an engine: layers, and the image that they make up."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

from tests.tiny_stack import ROOT, digest
from twinrun.images.archive import Image, ImageLayer, image_archive
from twinrun.images.dockerfile import read_dockerfile
from twinrun.images.layers import Layer, Snapshot, is_excluded, read_snapshot, write_layer

# Layers


def tree(paths: Iterable[tuple[str, object]], *, time: int = 0) -> bytes:
    """Return a tar: None is a folder, bytes a file, `->` a link, `=>` a hard link."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in paths:
            member = tarfile.TarInfo(name)
            member.mtime, member.mode = time, 0o644
            if content is None:
                member.type, member.mode = tarfile.DIRTYPE, 0o750
            elif isinstance(content, str):
                member.type = tarfile.SYMTYPE if content.startswith("->") else tarfile.LNKTYPE
                member.linkname = content[2:]
            else:
                assert isinstance(content, bytes)
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return stream.getvalue()


def snapshot_of(*layers: bytes, folder: Path) -> Snapshot:
    files = [folder / f"{number}.tar" for number in range(len(layers))]
    for file, layer in zip(files, layers, strict=True):
        file.write_bytes(layer)
    return read_snapshot(files)


def layer_of(
    above: bytes, below: Snapshot | None, **options: object
) -> tuple[Layer, dict[str, tarfile.TarInfo]]:
    out = io.BytesIO()
    layer = write_layer(io.BytesIO(above), out, parent=below, epoch=7, **options)  # type: ignore[arg-type]
    assert layer.diff_id == f"sha256:{digest(out.getvalue())}"
    assert layer.size == len(out.getvalue())
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        return layer, {member.name: member for member in tar}


BELOW = (
    *(("a", None), ("a/kept", b"1"), ("a/changed", b"2"), ("a/link", "->kept")),
    *(("gone", None), ("gone/deep", b"3"), ("kind", b"4")),
)


def test_a_layer_has_what_is_new_and_hides_what_is_gone(tmp_path: Path) -> None:
    below = snapshot_of(tree(BELOW), folder=tmp_path)
    above = tree(
        [
            *(("a", None), ("a/kept", b"1"), ("a/changed", b"5"), ("a/link", "->changed")),
            *(("a/new", b""), ("kind", None), ("kind/in", b"6"), ("tmp/x", b"7"), ("var/log/apt.log", b"8")),
        ],
        time=99,
    )
    _, members = layer_of(above, below)
    assert set(members) == {"a", "a/changed", "a/link", "a/new", "kind", "kind/in", ".wh.gone"}
    assert {member.mtime for member in members.values()} == {7}
    assert members["a"].mode == 0o750


def test_nothing_new_is_an_empty_layer(tmp_path: Path) -> None:
    below = snapshot_of(tree(BELOW, time=1), folder=tmp_path)
    _, members = layer_of(tree(BELOW, time=2), below)
    assert members == {}


def test_layers_lie_on_each_other_as_an_engine_lays_them(tmp_path: Path) -> None:
    above = tree([("kind", b"9"), ("a", None), ("a/new", "=>kind"), ("a/.wh.changed", b"")])
    below = snapshot_of(tree([*BELOW[:-1], ("kind", None), ("kind/in", b"6")]), above, folder=tmp_path)
    assert set(below) == {"a", "a/kept", "a/link", "a/new", "gone", "gone/deep", "kind"}
    assert below["a/new"] == below["kind"]


def test_a_stage_from_nothing_has_its_files_alone() -> None:
    """An engine that exports a container adds its empty mount points."""
    made: list[tuple[str, object]] = [("opt", None), ("opt/made", b"1")]
    plain, members = layer_of(tree(made), None)
    assert list(members) == ["opt", "opt/made"]
    exported, _ = layer_of(tree([("dev", None), ("dev/console", b""), *made, ("proc", None)]), None)
    assert exported == plain


def test_a_new_hard_link_brings_the_file_it_leads_to(tmp_path: Path) -> None:
    below = snapshot_of(tree([("one", b"content")]), folder=tmp_path)
    above = tree([("one", b"content"), ("two", "=>one")])
    layer, _ = layer_of(above, below)
    assert layer.missing_targets == {"one"}
    layer, members = layer_of(above, below, include=layer.missing_targets)
    assert not layer.missing_targets
    assert list(members) == ["one", "two"]


def test_traces_of_the_making_are_left_out() -> None:
    for path in ("var/log/dpkg.log", "etc/passwd-", "var/cache/ldconfig/aux-cache", "run/x", "etc/hosts"):
        assert is_excluded(path), path
    for path in ("var/log", "etc/passwd", "twinrun/run/x", "usr/lib/python3/x.pyc", "etc/ld.so.cache", "tmp"):
        assert not is_excluded(path), path


# Images


def image(tmp_path: Path) -> Image:
    layer = tmp_path / "layer.tar"
    layer.write_bytes(tree([("file", b"content")]))
    return Image(
        platform="linux/amd64",
        epoch=1_700_000_000,
        container_config=read_dockerfile(ROOT / "images/Dockerfile").container_config(),
        labels={"b": "2", "a": "1"},
        layers=(ImageLayer(diff_id=f"sha256:{digest(layer.read_bytes())}", created_by="test", file=layer),),
    )


def test_an_image_starts_as_the_dockerfile_says(tmp_path: Path) -> None:
    configuration = json.loads(image(tmp_path).configuration())
    assert configuration["created"] == "2023-11-14T22:13:20Z"
    assert configuration["config"]["User"] == "1000:1000"
    assert configuration["config"]["WorkingDir"] == "/twinrun/project"
    path = dict(part.split("=", 1) for part in configuration["config"]["Env"])["PATH"].split(":")
    assert path[0] == "/opt/twinrun/python/bin"
    assert "/usr/bin" in path


def test_an_archive_is_an_oci_layout_that_older_engines_read_too(tmp_path: Path) -> None:
    made = image(tmp_path)
    content = b"".join(image_archive(made, "a:b"))
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        members = tar.getmembers()
        files = {one.name: tar.extractfile(one).read() for one in members if one.isfile()}  # type: ignore[union-attr]
    # Apptainer makes no folder that no member names.
    folders = [one.name for one in members if one.isdir()]
    assert folders == [one.name for one in members[:2]] == ["blobs", "blobs/sha256"]
    blobs = {f"blobs/sha256/{digest(blob)}": blob for path, blob in files.items() if "/" in path}
    assert files.keys() == {*blobs, "oci-layout", "index.json", "manifest.json"}
    (entry,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(blobs[entry["digest"].replace("sha256:", "blobs/sha256/")])
    for one in (manifest["config"], *manifest["layers"]):
        assert len(blobs[one["digest"].replace("sha256:", "blobs/sha256/")]) == one["size"]
    assert manifest["config"]["digest"] == made.id()
    (older,) = json.loads(files["manifest.json"])
    assert older["RepoTags"] == ["a:b"]
    assert {older["Config"], *older["Layers"]} <= blobs.keys()


# Stages


def test_a_stage_is_known_by_all_that_it_is_made_of(tmp_path: Path) -> None:
    dockerfile = read_dockerfile(ROOT / "images/Dockerfile")
    for folder in ("packages/runtime", "packages/build", "python", "tools", "kernels/made"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").write_text(folder, encoding="utf-8")
    (tmp_path / "base.tar").write_bytes(b"base")
    variables = {"PYTHON": "3.11", "ARCHS": "sm_90", "SOURCE_DATE_EPOCH": "7"}

    def keys(**more: str) -> dict[str, str]:
        return dockerfile.stage_keys(trees=dockerfile.file_trees(tmp_path), variables=variables | more)

    before = keys()

    def changed(path: str) -> set[str]:
        kept = (tmp_path / path).read_bytes()
        (tmp_path / path).write_bytes(b"changed")
        now = keys()
        (tmp_path / path).write_bytes(kept)
        return {stage for stage in before if before[stage] != now[stage]}

    assert changed("kernels/made/file") == {"compiled", "kernels", "runtime"}
    assert changed("tools/file") == {"compiled", "kernels", "runtime"}
    assert changed("python/file") == {"python", "compiled", "kernels", "runtime"}
    assert changed("packages/build/file") == {"tools", "python", "compiled", "kernels", "runtime"}
    assert changed("base.tar") == before.keys()
    other = keys(ARCHS="sm_80")
    assert {stage for stage in before if before[stage] != other[stage]} == {"compiled", "kernels", "runtime"}
