"""Control runs of any model, and where two runs begin to differ."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from tests.parity import small_model  # noqa: E402
from tests.records import ROOT  # noqa: E402
from twinrun.foundation.errors import InputError  # noqa: E402
from twinrun.parity import Tracer, renumber  # noqa: E402
from twinrun.parity.traces import Trace, judge_traces, read_trace  # noqa: E402

CONTROLS = 8


@pytest.mark.parametrize("name", ["plain", "encoder"])
def test_a_renumbered_model_is_the_same_function_in_other_sums(name: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = small_model.Model()
    given = torch.randint(0, 90, (4, 16))
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        model, given = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(4, 8, 32)
    first = model(given)
    before = {key: one.detach().clone() for key, one in model.named_parameters()}
    order = renumber(model, 1)
    second = model(given)
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)
    assert not torch.equal(first, second)
    second.square().sum().backward()
    for key, one in model.named_parameters():
        rows, columns = order.get(key, (None, None))
        expected = before[key]
        expected = expected if rows is None else expected[rows]
        expected = expected if columns is None else expected[:, columns]
        assert torch.equal(one, expected)
        assert one.grad is not None


@pytest.mark.needs("transformers")
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Qwen3", "GPTNeoX"])
def test_models_of_transformers_are_renumbered(family: str) -> None:
    import transformers  # noqa: PLC0415

    sizes: dict[str, float] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 100} | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    if family != "GPT2":
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
    tokens = torch.randint(0, 100, (4, 16))
    first = model(tokens, labels=tokens)
    renumber(model, 3)
    second = model(tokens, labels=tokens)
    torch.testing.assert_close(first.logits, second.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(first.loss, second.loss, rtol=1e-6, atol=1e-6)
    assert not torch.equal(first.logits, second.logits)


def test_a_model_without_hidden_features_is_refused() -> None:
    with pytest.raises(ValueError, match="no hidden features that are known"):
        renumber(nn.Linear(3, 3), 1)


@pytest.mark.parametrize("name", ["parity/controls", "protocol/digests"])
def test_the_files_for_other_programs_need_torch_alone(name: str, tmp_path: Path) -> None:
    source = ROOT / "src" / "twinrun" / f"{name}.py"
    text = source.read_text(encoding="utf-8")
    tree = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import)]
    named = {(node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name for node in tree}
    roots = {one.partition(".")[0] for one in named}
    assert roots - set(sys.stdlib_module_names) == {"torch"}
    copy = tmp_path / source.name
    copy.write_text(text, encoding="utf-8")
    subprocess.run([sys.executable, "-I", "-c", f"import runpy; runpy.run_path({str(copy)!r})"], check=True)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trace, list[Trace], Path]:
    """Return the trace of a run, and those of its control runs."""
    folder = tmp_path_factory.mktemp("traces")
    return (*made(folder), folder)


def made(folder: Path, *, dropout: float = 0.0, seed: int = 0) -> tuple[Trace, list[Trace]]:
    found = []
    with small_model.one_thread():
        for number in range(CONTROLS + 1):
            path = folder / f"{seed}-{dropout}-{number}.trace"
            small_model.trained(path, control=number, dropout=dropout, seed=seed)
            found.append(read_trace(path))
    return found[0], found[1:]


def named(
    run: Trace, controls: list[Trace], fault: small_model.PlantedFault, folder: Path
) -> tuple[bool, str]:
    """Train with a fault, and say whether its step and layer are named."""
    path = folder / "faulty.trace"
    with small_model.one_thread():
        small_model.trained(path, fault=fault, dropout=fault.dropout)
    found = judge_traces(run, read_trace(path), controls=controls)
    right = found.step == small_model.FAULTY and (found.layer or "").startswith(fault.layer)
    return right, f"{fault.name}: {found.sentence}"


@pytest.mark.parametrize("place", [1, 7, 13], ids=lambda place: small_model.FAULTS[place].name)
def test_a_fault_is_named_at_its_step_and_layer(traces: tuple[Trace, list[Trace], Path], place: int) -> None:
    right, said = named(traces[0], traces[1], small_model.FAULTS[place], traces[2])
    assert right, said


@pytest.mark.trials
def test_of_20_faults_19_are_named_at_the_right_layer(tmp_path: Path) -> None:
    runs = {dropout: made(tmp_path, dropout=dropout) for dropout in (0.0, 0.1, 0.3)}
    found = [named(*runs[fault.dropout], fault, tmp_path) for fault in small_model.FAULTS]
    assert len(found) == 20
    assert sum(right for right, _ in found) >= 19, [said for right, said in found if not right]


@pytest.mark.trials
def test_of_100_clean_pairs_none_is_named(tmp_path: Path) -> None:
    alarms = []
    for seed in range(4):
        run, controls = made(tmp_path, seed=seed)
        for number in range(100, 125):
            with small_model.one_thread():
                small_model.trained(tmp_path / "clean.trace", control=number, seed=seed)
            found = judge_traces(run, read_trace(tmp_path / "clean.trace"), controls=controls)
            alarms += [found.sentence] * found.code
    assert not alarms


def test_without_control_runs_nothing_is_named(traces: tuple[Trace, list[Trace], Path]) -> None:
    run, controls, _ = traces
    for given in ([], controls[:7], [run] * 8):
        assert judge_traces(run, controls[7], controls=given).code == 3


@pytest.mark.parametrize("text", ["", "{}", "[1]", "text", '{"format": "twinrun-trace/9"}'])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.trace"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="not a trace"):
        read_trace(path)


class Positions(nn.Module):
    """A model whose table of positions gives the same in each call, whatever the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.table(torch.arange(8)))


@pytest.mark.parametrize("autocast", [False, True])
def test_microbatches_and_autocast_leave_digests_as_they_are(tmp_path: Path, autocast: bool) -> None:
    torch.manual_seed(0)
    model, x = Positions(), torch.randn(8, 8, 16)
    found = []
    for parts in (1, 4):
        path = tmp_path / f"{parts}.trace"
        tracer = Tracer(model, path)
        with tracer.step(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            for part in x.split(8 // parts):
                (model(part).square().sum() / len(x)).backward()
        model.zero_grad()
        found.append(read_trace(path).steps[1])
    for name, digest in found[0].items():
        # Products of 16 bits would be 4e-3 apart in a digest.
        allowed = 1e-2 if autocast and name.startswith("backward") else 1e-5
        assert digest == pytest.approx(found[1][name], rel=allowed, abs=allowed * digest[0]), name
