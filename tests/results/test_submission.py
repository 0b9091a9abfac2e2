"""A record that is sent in says nothing of hosts and folders, and is taken once, whole and unforged."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.records import PROJECT, ROOT
from twinrun.cli.checkpoint import signature_for
from twinrun.cli.report import report
from twinrun.foundation.errors import InputError
from twinrun.planning.project import Project
from twinrun.report.form import offer, send
from twinrun.results import submission
from twinrun.results.finished_run import read_run
from twinrun.results.reading import plan_hash, read_record
from twinrun.results.record import Record, content_digest
from twinrun.results.submission import add_submission, write_submission

COMMITTED = next(iter(sorted((ROOT / "recipes/mpt-throughput/results").glob("*_cuda13.0-*.json"))))
RECIPE = "recipes/mpt-throughput"
HOST = "gpu-17.cluster.example.org"


def measured(record: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in record["points"][0]["measurements"] if one["id"] == name)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as a volunteer has it: a committed record that ran on a named host, with a log."""
    content = json.loads(COMMITTED.read_text(encoding="utf-8"))
    text = json.dumps(content).replace(json.dumps(content["machine"]["host"]), json.dumps(HOST))
    content = json.loads(text)
    content["environment"]["variables"]["NCCL_TOPO_FILE"] = "/scratch/somebody/topology/node.xml"
    content["run"] = f"{content['run'][:-4]}beef"
    memory = measured(content, "peak-memory")
    memory |= dict.fromkeys(("median", "low", "high"), memory["median"] + 0.5)
    content["sha256"] = content_digest(content)
    folder = tmp_path / "run"
    (folder / "log").mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps(content), encoding="utf-8")
    log = f"{HOST}: loading /scratch/somebody/data/shard-0\n"
    log += "gpu-17:71:71 [0] NCCL INFO Using [0]eth0:10.20.30.40<0>\ngpu-17.ib.example.org: up\n"
    log += "step\n" * 1000
    (folder / "log/launcher.log").write_text(log, encoding="utf-8")
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A checkout whose recipe takes records, with all else of the project."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "recipes", root / "recipes", ignore=shutil.ignore_patterns("__pycache__"))
    (root / "images").symlink_to(ROOT / "images")
    return Project(root)


def sent_in(run: Path, **more: Any) -> Path:
    write_submission(run / "submission.json", read_run(run, PROJECT), **more)
    return run / "submission.json"


def test_a_submission_names_no_host_and_no_folder(run: Path) -> None:
    text = sent_in(run, doctor={"checks": [f"{HOST} has /scratch/somebody/venv/bin"]}).read_text()
    content = json.loads(text)
    for private in (HOST, "gpu-17", "example.org", "somebody", "GPU-", "192.0.2.2", "10.20.30.40"):
        assert private not in text
    assert content["record"]["machine"]["host"] == "node-1"
    assert content["record"]["environment"]["variables"]["NCCL_TOPO_FILE"] == "…/node.xml"
    assert content["doctor"] == {"checks": ["node-1 has …/bin"]}
    assert content["logs"]["log/launcher.log"].startswith("node-1:71:71")
    assert len(content["logs"]["log/launcher.log"].splitlines()) == 38
    assert content["run_sha256"] == json.loads((run / "record.json").read_text())["sha256"]


CANARIES = (
    *("hf_canary0123456", "canary-pw", "canary-aws", "adalovelace", "canary@example.com", "canary-bearer"),
    *("fe80::1c2d:3e4f", "2001:db8::ff00:42:8329", "~/canary", "canary-line"),
)
LEAKS = """HF_TOKEN=hf_canary0123456 NCCL INFO started
NCCL INFO https://bob:canary-pw@example.org/x
RuntimeError: AWS_SECRET=canary-aws of adalovelace
rank 0 mail canary@example.com, Authorization: Bearer canary-bearer
NCCL INFO NET/IB fe80::1c2d:3e4f and 2001:db8::ff00:42:8329, topology ~/canary/file.xml
canary-line that no list of lines has
"""


def test_no_canary_leaves(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "adalovelace")
    (run / "log/launcher.log").write_text(LEAKS, encoding="utf-8")
    text = sent_in(run, doctor={"checks": [LEAKS]}).read_text(encoding="utf-8")
    log = json.loads(text)["logs"]["log/launcher.log"]
    for canary in CANARIES[:-1]:
        assert canary not in text, canary
    assert "canary-line" not in log
    assert "NCCL INFO started" in log
    assert "file.xml" in log


def test_a_link_among_the_logs_is_not_followed(run: Path) -> None:
    private = run.parent / "id_ed25519"
    private.write_text("NCCL INFO private\n", encoding="utf-8")
    (run / "log/other.log").symlink_to(private)
    assert list(json.loads(sent_in(run).read_text())["logs"]) == ["log/launcher.log"]


def test_a_credential_in_what_is_sealed_is_refused(run: Path) -> None:
    content = json.loads((run / "record.json").read_text())
    content["run"] = "HF_TOKEN=hf_canary0123456"
    content["sha256"] = content_digest(content)
    (run / "record.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InputError, match="looks like a password"):
        sent_in(run)
    assert not (run / "submission.json").exists()


def test_what_checks_say_of_hosts_is_taken_out(run: Path) -> None:
    content = json.loads((run / "record.json").read_text())
    found = {"id": "mtu", "outcome": "fail", "place": HOST, "reason": f"{HOST} has another", "nodes": [HOST]}
    content["points"][0]["checks"] = [found]
    content["points"][0]["facts"]["culprit"] = HOST
    content["sha256"] = content_digest(content)
    (run / "record.json").write_text(json.dumps(content), encoding="utf-8")
    (point,) = json.loads(sent_in(run).read_text())["record"]["points"]
    assert point["checks"][0]["nodes"] == ["node-1"]
    assert HOST not in json.dumps(point)


def test_a_submission_is_added_and_shown_as_sent_in(run: Path, project: Project) -> None:
    sent = sent_in(run)
    path, record = add_submission(sent, RECIPE, project)
    assert path.name.startswith(COMMITTED.stem)
    assert read_record(path, project) == record
    assert record.evidence == "as sent in"
    page = path.parent / "page.html"
    with contextlib.chdir(project.root):
        report(RECIPE, out=page)
    assert "as sent in" in page.read_text(encoding="utf-8")
    with pytest.raises(InputError, match="the results have this run") as refused:
        add_submission(sent, RECIPE, project)
    assert refused.value.found == path.name


def test_the_page_of_a_single_record_is_not_among_the_results(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project.root / RECIPE / "results" / COMMITTED.name
    with contextlib.chdir(project.root):
        report(str(file)).show(as_json=False)
    page = Path(capsys.readouterr().out.strip())
    assert page == project.root / "runs" / "mpt-throughput" / f"{COMMITTED.stem}.html"
    assert page.is_file()
    assert not list(file.parent.glob("*.html"))


def test_a_single_record_is_sent_from_where_the_caller_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert send(read_run(COMMITTED, PROJECT), Path("submission.json")) == Path("submission.json")
    assert json.loads(Path("submission.json").read_text())["logs"] == {}


def edited(content: dict[str, Any], *path: str, to: object) -> None:
    *parents, last = path
    for name in parents:
        content = content[name]
    content[last] = to


def sealed(content: dict[str, Any]) -> None:
    content["record"]["sha256"] = content_digest(content["record"])


def faster(content: dict[str, Any]) -> None:
    rate = measured(content["record"], "tokens-per-second")
    rate |= {field: 1.2 * rate[field] for field in ("median", "low", "high")}
    sealed(content)


def held(content: dict[str, Any]) -> None:
    content["record"]["plan"]["part"]["training"]["global_batch"] = 96
    sealed(content)


def dirty(content: dict[str, Any]) -> None:
    content["record"]["revision"]["changes_sha256"] = "0" * 64
    sealed(content)


def other_gpu(content: dict[str, Any]) -> None:
    content["record"]["gpu"]["peak_bf16_tflops"] = 2000.0
    sealed(content)


def not_sent(content: dict[str, Any]) -> None:
    content["record"]["evidence"] = "measured"
    sealed(content)


def copied(content: dict[str, Any]) -> None:
    original = measured(json.loads(COMMITTED.read_text(encoding="utf-8")), "peak-memory")
    measured(content["record"], "peak-memory").update(original)
    sealed(content)


def outside(content: dict[str, Any]) -> None:
    content["record"]["plan"]["stack"] = "../../../stack"
    content["record"]["plan_sha256"] = plan_hash(content["record"])
    sealed(content)


def undated(content: dict[str, Any]) -> None:
    content["record"]["created"] = "../../2026"
    sealed(content)


def lacking(content: dict[str, Any]) -> None:
    del content["record"]["points"][0]["facts"]["order hash"]
    sealed(content)


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "an edited record": (lambda c: edited(c, "record", "run", to="x"), "changed after it was written"),
    "a forged rate": (faster, "contradicts itself: median of devices=1, tokens-per-second"),
    "another plan": (held, "contradicts itself: the plan's hash"),
    "another peak": (other_gpu, "contradicts itself: peak_bf16_tflops"),
    "changes that no commit has": (dirty, "not the run of a clean commit"),
    "a record that the project would have measured": (not_sent, "a record that was not sent in"),
    "a committed record under another name": (copied, "the results have these numbers"),
    "a file outside of the results": (outside, "no stack of the recipe"),
    "a time that is a path": (undated, "not a time"),
    "a newer form": (lambda c: edited(c, "schema_version", to=2), "schema_version"),
    "a record without a fact": (lacking, "the account of the record is not complete"),
    "no record": (lambda c: c.pop("record"), "record"),
    "a record of nothing": (lambda c: edited(c, "record", to={}), "not a record"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_forged_is_refused(name: str, run: Path, project: Project) -> None:
    sent = sent_in(run)
    change, expected = FAULTS[name]
    content = json.loads(sent.read_text())
    change(content)
    sent.write_text(json.dumps(content), encoding="utf-8")
    before = sorted((project.root / RECIPE / "results").iterdir())
    with pytest.raises(InputError) as refused:
        add_submission(sent, RECIPE, project)
    assert expected in str(refused.value)
    assert sorted((project.root / RECIPE / "results").iterdir()) == before


def test_a_foreign_or_truncated_file_is_refused(run: Path, project: Project) -> None:
    sent = sent_in(run)
    with pytest.raises(InputError, match="of another recipe"):
        add_submission(sent, "recipes/mpt7b-scaling", project)
    sent.write_text(sent.read_text()[:5000], encoding="utf-8")
    with pytest.raises(InputError, match="not a submission"):
        add_submission(sent, RECIPE, project)
    with pytest.raises(InputError, match="a record, and not a submission"):
        add_submission(COMMITTED, RECIPE, project)
    with pytest.raises(InputError, match="no such submission"):
        add_submission(run / "absent.json", RECIPE, project)


def test_a_submission_is_read_once(run: Path, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    file, judged = sent_in(run), submission._judged

    def swap(*found: Any) -> Record:
        file.write_text("{}")
        return judged(*found)

    monkeypatch.setattr(submission, "_judged", swap)
    for one in (project.root / RECIPE / "results").iterdir():
        one.unlink()
    added, record = add_submission(file, RECIPE, project)
    assert read_record(added, project).sha256 == record.sha256


def test_a_run_on_new_hardware_leaves_form_and_file(run: Path, project: Project) -> None:
    for file in (project.root / RECIPE / "results").iterdir():
        file.unlink()
    record = read_record(run, project)
    text = offer(read_run(run, project))
    assert "--add submission.json" in text
    assert (run / "form.md").read_text() == text
    assert add_submission(run / "submission.json", RECIPE, project)[1].run == record.run
    assert offer(read_run(run, project)) == ""


@pytest.mark.needs("ssh-keygen")
def test_the_signature_of_a_submission_goes_with_its_record(
    run: Path, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    monkeypatch.setenv("TWINRUN_SIGNERS", str(tmp_path / "signers"))
    (tmp_path / "signers").write_text(f"ada@example.org {key.with_name('key.pub').read_text()}")
    file = sent_in(run)
    signature_for(project.root, str(file), key=key)
    added, record = add_submission(file, RECIPE, project)
    assert record.signature == read_record(added, project).signature == "signed by ada@example.org"
    assert sorted(added.parent.glob(f"{added.name}*")) == [added, Path(f"{added}.sig")]


@pytest.mark.needs("ssh-keygen")
def test_a_submission_whose_signature_does_not_match_is_refused(run: Path, project: Project) -> None:
    file = sent_in(run)
    Path(f"{file}.sig").write_text("junk")
    with pytest.raises(InputError, match="the signature does not match"):
        add_submission(file, RECIPE, project)


def test_a_record_of_a_changed_environment_is_refused(run: Path) -> None:
    content = json.loads((run / "record.json").read_text())
    content["environment"]["changed_files"] = {"lib/torch/a.py": "not as it was installed"}
    content["sha256"] = content_digest(content)
    (run / "record.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="files of its environment were changed"):
        sent_in(run)
