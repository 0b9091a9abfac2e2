"""What a whole Mamba costs on this GPU, beside the same model with upstream's kernels.

`python recipes/mamba-throughput/tools/measure.py race` times whole training steps of both in one process,
which take turns. `profile` says which kernels a step's time goes to, and draws it with `--picture FILE`.
`decode` times one token of generation through transformers, replayed as a CUDA graph, beside the time in
which the GPU's memory could deliver the weights. The model is `mambaoutai` of recipe.toml, in bf16 with
parameters and moments of it. Exit code 2 where it cannot start.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "mamba-kernels" / "kernels" / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "kernels/shared/src"))
from twinrun.foundation.errors import TwinrunError
from twinrun.protocol.models import member
from twinrun.protocol.models.mamba import MambaShape
from twinrun.train.models import IGNORED
from twinrun.train.models.mamba import Mamba

RECIPE = Path(__file__).parents[1]
# Kernels with one of these in their names; the first that fits, the rest of a step is the last row.
GROUPS = {
    "scan forward": ("scan_forward",),
    "scan backward": ("scan_backward",),
    "sums of the scan backward": ("scan_reduce",),
    "convolution forward": ("conv_forward",),
    "convolution backward": ("conv_backward", "conv_reduce"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "Cijk", "splitK"),
    "AdamW and clipping": ("multi_tensor", "Adam", "lpnorm"),
}
REST = "elementwise, norms and loss"
CLIP = 1.0
# Decoded in one go, so that starting the graph is no part of a token's time.
TOKENS = 100
LONGEST = 16
Step = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what was asked for; return the exit code."""
    given = _parser().parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("measure: found no GPU that torch sees, allowed one; hint: run it on a GPU node\n")
        return 2
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, model {given.model}, bf16")
    try:
        {"race": race, "profile": profile, "decode": decode}[given.what](given)
    except torch.OutOfMemoryError:
        sys.stderr.write(f"measure: out of memory at --microbatch {given.microbatch}; hint: a smaller one\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("measure: stopped; hint: --repeats has fewer steps\n")
        return 130
    except (TwinrunError, ImportError) as error:
        sys.stderr.write(f"measure: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="measure", description=__doc__)
    parser.add_argument("what", choices=("race", "profile", "decode"))
    parser.add_argument("--model", default="mambaoutai", choices=sorted(_models()))
    parser.add_argument("--microbatch", type=_positive, default=6, help="sequences in one pass")
    parser.add_argument("--microbatches", type=_positive, default=4, help="passes in a step")
    parser.add_argument("--repeats", type=_positive, default=5, help="timed steps, whose median counts")
    parser.add_argument("--against", default="upstream", choices=("upstream", "ours"), help="the other side")
    parser.add_argument("--picture", type=_picture, help="draw the profile into this file, .svg or .png")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text}, allowed 1 or more")
    return int(text)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in {".svg", ".png"} or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"found {text}, allowed a .svg or .png in a folder that is there")
    return path


def _models() -> list[str]:
    """Return the published members that the recipe names."""
    names: list[str] = tomllib.loads((RECIPE / "recipe.toml").read_text(encoding="utf-8"))["members"]
    return names


def shape_of(given: argparse.Namespace) -> MambaShape:
    """Return the shape that the recipe has under a name."""
    shape = member(given.model, place="--model")
    assert isinstance(shape, MambaShape)
    return shape


def step_of(given: argparse.Namespace, *, kernels: str, layout: str) -> Step:
    """Return a whole training step of a new model: passes, clipping, AdamW; compiled whole."""
    shape = shape_of(given)
    with torch.device("cuda"):
        model = Mamba(
            shape, kernels=kernels, layout=layout, dtype=torch.bfloat16, parameter_type=torch.bfloat16
        )
    model.initialise(0)
    model.compile_whole()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens_BS = torch.randint(shape.vocabulary, (given.microbatch, shape.sequence), device="cuda")
    targets_BS = nn.functional.pad(tokens_BS[:, 1:], (0, 1), value=IGNORED)

    def step() -> None:
        for _ in range(given.microbatches):
            (model(tokens_BS, targets_BS) / given.microbatches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def race(given: argparse.Namespace) -> None:
    """Time steps of both in turns, and print tokens a second of each and their ratio."""
    sides = {"ours, token-major": step_of(given, kernels="ours", layout="token-major")}
    sides[f"{given.against}, channel-first"] = step_of(given, kernels=given.against, layout="channel-first")
    for step in sides.values():
        for _ in range(2):
            step()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(given.repeats):
        for name, step in list(sides.items())[:: -1 if repeat % 2 else 1]:
            # The first step of a turn finds memory that is laid out for the other side.
            step()
            times[name].append(seconds(step))
    tokens = given.microbatches * given.microbatch * shape_of(given).sequence
    rates = {name: tokens / statistics.median(spent) for name, spent in times.items()}
    for name, rate in rates.items():
        low, high = (tokens / edge for edge in (max(times[name]), min(times[name])))
        steps = f"{given.repeats} steps of {tokens:,} tokens"
        print(f"{name}: {rate:,.0f} tokens/s ({low:,.0f} to {high:,.0f}, {steps})")
    first, second = rates.values()
    print(
        f"ratio {first / second:.3f}, peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of both"
    )


def seconds(step: Step) -> float:
    """Return the wall time of a call, the device's work included."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def profile(given: argparse.Namespace) -> None:
    """Print the share of each group of kernels in the GPU's time of a whole step."""
    step = step_of(given, kernels="ours", layout="token-major")
    for _ in range(3):
        step()
    whole = statistics.median(seconds(step) for _ in range(given.repeats))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    spent = {event.key: event.self_device_time_total / 1e6 for event in seen.key_averages()}
    shares, busy = Counter[str](), sum(spent.values())
    for name, time_s in spent.items():
        shares[group_of(name)] += time_s / busy
    print(f"step {whole:.4f} s, kernels {busy:.4f} s, {busy / whole:.1%} of it")
    for name, share in shares.most_common():
        print(f"{share:6.1%} {name}")
    for name in sorted(spent, key=spent.__getitem__)[:-LONGEST:-1]:
        print(f"  {spent[name] / busy:6.1%} {group_of(name)}: {name[:90]}")
    if given.picture:
        draw(dict(shares.most_common()), given)


def group_of(kernel: str) -> str:
    """Return what a kernel is counted as."""
    return next((group for group, words in GROUPS.items() if any(word in kernel for word in words)), REST)


def draw(shares: dict[str, float], given: argparse.Namespace) -> None:
    """Draw shares of a step as bars."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "twinrun"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    bars = axes.barh(list(shares), [100 * share for share in shares.values()], color="#4c78a8")
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("share of the GPU's time in a training step, %")
    hardware = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    axes.set_title(f"{given.model}, {given.microbatch} sequences a pass, {hardware}", fontsize=10)
    figure.savefig(given.picture, metadata={"Date": None} if given.picture.suffix == ".svg" else None)


def decode(given: argparse.Namespace) -> None:
    """Time one token of a batch of one, and print the share of what memory would allow."""
    with torch.inference_mode():
        _decode(given)


def _decode(given: argparse.Namespace) -> None:
    import transformers
    import twinrun_mamba

    shape = shape_of(given)
    print(f"transformers {version('transformers')}\n{twinrun_mamba.install('transformers')}")
    config = transformers.MambaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        state_size=shape.states,
        time_step_rank=shape.rank,
        tie_word_embeddings=False,
        residual_in_fp32=False,
    )
    with torch.device("cuda"):
        model = transformers.MambaForCausalLM(config).to(torch.bfloat16).eval()
    read = sum(one.nbytes for one in model.parameters()) - model.get_input_embeddings().weight.nbytes
    bound = read / copied_bytes_per_second()
    print(f"weights read for a token: {read / 1e9:.3f} GB, {bound * 1e3:.3f} ms at the copy rate of this GPU")
    for name, function in {"as it is": model.forward, "torch.compile": _compiled(model)}.items():
        token = _token_of(model, function, shape)
        took = statistics.median(seconds(token) / TOKENS for _ in range(given.repeats))
        print(
            f"decode, batch 1, CUDA graph, {name}: {took * 1e3:.3f} ms a token, {1 / took:,.0f} tokens/s, "
            f"{bound / took:.3f} of the bound"
        )
        _show_kernels(token)


def _compiled(model: nn.Module) -> Callable[..., Any]:
    # Products of one row become reductions, which read weights faster than matrix kernels do.
    options = {"coordinate_descent_tuning": True}
    compiled: Callable[..., Any] = torch.compile(model.forward, dynamic=False, options=options)
    return compiled


def _token_of(model: Any, function: Callable[..., Any], shape: MambaShape) -> Step:
    """Return what decodes TOKENS tokens after a prompt, by a graph that was captured."""
    prompt_BS = torch.randint(shape.vocabulary, (1, 64), device="cuda")
    cache = model(prompt_BS, use_cache=True).cache_params
    token_BS = prompt_BS[:, -1:].clone()

    def step() -> Tensor:
        logits: Tensor = function(token_BS, cache_params=cache, use_cache=True).logits
        return logits

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits = step()
    graph.replay()
    assert torch.isfinite(logits).all()
    return lambda: [graph.replay() for _ in range(TOKENS)]


def _show_kernels(step: Step) -> None:
    """Print the kernels that take longest, in microseconds a token."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    spent = {event.key: (event.self_device_time_total / TOKENS, event.count) for event in seen.key_averages()}
    for name in sorted(spent, key=spent.__getitem__)[:-LONGEST:-1]:
        took, count = spent[name]
        print(f"  {took:7.1f} us in {count / TOKENS:.0f} calls: {name[:90]}")


def copied_bytes_per_second() -> float:
    """Return the bytes that a large copy reads and writes per second."""
    values = torch.ones(2 << 30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(values)
    target.copy_(values)
    took = statistics.median(seconds(lambda: target.copy_(values)) for _ in range(10))
    return float(2 * values.nbytes / took)


if __name__ == "__main__":
    sys.exit(main())
