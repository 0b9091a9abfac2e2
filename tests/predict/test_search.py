"""The cheapest layouts on machines that are offered, and what the command refuses before it looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import invoke
from tests.contracts.tree import ROOT
from twinrun.foundation.errors import InputError
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.search import Search, best, layouts
from twinrun.protocol.models import member

GPUS = Project(ROOT).gpus
KNOWN = calibration()
LIKE = ParallelLayout(global_batch=1536, microbatch=1, shards="parameters")


def offer(gpu: str = "h200", *, nodes: int = 1, price: float = 1.0) -> Machines:
    return Machines(GPUS[gpu], 8, nodes, 400e9, price)


def search(*offers: Machines, model: str = "mpt-7b", **more: Any) -> Search:
    software = KNOWN.of(more.pop("software", "twinrun-2026"))
    return best(member(model, place="model"), offers, LIKE, software, **({"count": 3} | more))


def test_the_cheapest_is_the_same_twice_and_surely_fits() -> None:
    offers = [offer(nodes=nodes) for nodes in (1, 2, 4)]
    first, again = (search(*offers, model="mpt-13b") for _ in range(2))
    assert [one.layout for one in first.best] == [one.layout for one in again.best]
    assert first.seen > 4000
    assert {one.memory.fit(GPUS["h200"]) for one in first.best} == {"FITS"}
    sure = [one.prices(1e9)[2] for one in first.best]
    assert sure == sorted(sure)
    answers = {(one.machines, one.layout.tensor, one.layout.pipeline) for one in first.best}
    assert len(answers) == len(first.best)


def test_no_order_is_said_of_gpus_whose_intervals_overlap() -> None:
    dear = search(offer("h200"), offer("mi300x"))
    names = ("h200", "mi300x")
    first, second = (next(one for one in dear.best if one.machines.gpu.id == name) for name in names)
    even = first.prices(1.0)[0] / second.prices(1.0)[0]
    # At a price that makes both cost the same there is no order, at a tenth of it there is.
    same, cheap = (search(offer("h200"), offer("mi300x", price=even / share)) for share in (1, 10))
    assert set(same.unordered) == {GPUS["h200"].name, GPUS["mi300x"].name}
    assert cheap.unordered == ()
    assert {one.machines.gpu.id for one in cheap.best} == {*names}


def test_what_does_not_divide_is_left_out_and_counted() -> None:
    some = search(offer(nodes=1), offer(nodes=5), software="foundry-2023-10")
    assert [one.machines.nodes for one in some.best] == [1] * len(some.best)
    assert some.left_out == (f"{GPUS['h200'].name}, 5 x 8 devices",)
    with pytest.raises(InputError, match="no layout divides"):
        search(offer(nodes=5), software="foundry-2023-10")


def test_a_goal_asks_for_more_nodes_and_the_price_for_another_gpu() -> None:
    few, many = offer(), offer(nodes=4)
    assert search(few, many).best[0].machines == few
    goal = search(few).best[0].rate * 1.5
    asked = search(few, many, goal=goal)
    assert {one.machines for one in asked.best} == {many}
    assert all(one.rate >= goal for one in asked.best)
    dear, cheap = offer("h200", price=4.0), offer("h100-80gb", price=1.0)
    assert search(dear, cheap).best[0].machines == cheap


def test_what_no_layout_reaches_says_what_the_fastest_makes() -> None:
    found = search(offer(), goal=1e12)
    assert found.best == ()
    assert found.fastest
    assert found.fastest.rate == max(one.rate for one in search(offer()).best)
    unknown = search(offer("l40s"), model="mambaoutai")
    assert unknown.seen == 0
    assert "selective scan" in unknown.unknown[0]


def test_the_command_prints_the_cheapest_of_two_gpus() -> None:
    asked = ("--gpu", "h200,h100-80gb", "--price", "9,1", "--sweep", "--tokens=1e9", "--days=1")
    found = json.loads(invoke(ROOT, "predict", "mpt-7b", *asked, "--json").stdout)
    assert found["goal"] == pytest.approx(1e9 / 86400)
    assert found["predictions"][0]["gpu"] == "h100-80gb"
    shown = invoke(ROOT, "predict", "mpt-7b", *asked).stdout
    assert "layouts surely fit" in shown
    assert "512 sequences a step" in shown
    line = "predict mpt-7b --gpu=h200 --price=3 --tokens=1e11"
    shown = " ".join(invoke(ROOT, *line.split()).stdout.split())
    for words in ("days of 1e+11", "price of 1e+11", "6.66B parameters", "8 devices a node", "split (FSDP)"):
        assert words in shown


LINE = "tokens_per_second=9000 nodes=1 global_batch=64 microbatch=2"


def test_a_run_is_learned_from_as_a_line_and_as_a_log(tmp_path: Path) -> None:
    """9,000 tokens a second of 8 devices are 1.82 s for 64 sequences of 2,048 tokens."""
    log = tmp_path / "log.txt"
    log.write_text("elapsed time per iteration (ms): 9000.0 |\n elapsed time per iteration (ms): 1820.4 |\n")
    asked = ("mpt-7b", "--gpu=mi300x", "--nodes=64", "--network=3200", "--json")
    rates = []
    for given in ((), (LINE,), (f"log={log} global_batch=64 microbatch=2",)):
        found = json.loads(invoke(ROOT, "predict", *asked, *(f"--measured={one}" for one in given)).stdout)
        one = found["predictions"][0]
        assert one["runs"] == len(given)
        rates.append((one["tokens_per_second_per_device"], one["half_of_interval"]["with_runs"]))
    assert rates[1] == pytest.approx(rates[2], rel=1e-3)
    assert rates[1][1] < 0.8 * rates[0][1]
    shown = invoke(ROOT, "predict", *asked[:-1], f"--measured={LINE}").stdout
    assert "1 run(s) narrow the interval from a factor of" in " ".join(shown.split())


@pytest.mark.parametrize("name", ["megatron-2025", "torchtitan-2025", "twinrun-2026", "foundry-2023-10"])
def test_a_sweep_has_what_the_software_has(name: str) -> None:
    software, work = KNOWN.of(name), member("llama-8b", place="model").work()
    found = list(layouts(work, offer(nodes=2), LIKE.replace(global_batch=64), software))
    assert all(software.refuses(one) is None for one in found)
    for cut in ("tensor", "pipeline", "context", "interleaved"):
        assert (max(getattr(one, cut) for one in found) > 1) == (cut in software.cuts)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ("mpt-7b --gpu h200 --devices-per-node 7 --set tensor=4", "does not divide 7 devices"),
        ("mpt-7b --gpu h200 --set global_batch=100", "does not divide 100 sequences"),
        ("mpt-7b --gpu h200 --set experts=16", "experts are spread"),
        ("mpt-7b --gpu h200 --devices-per-node 3 --set tensor=3", "does not divide 4096 features"),
        ("mpt-7b --gpu h200 --nodes 8 --network 800 --set pipeline=64", "a part of a stage has a layer"),
        ("mpt-7b --gpu h200 --nodes 0", "expected a count"),
        ("mpt-7b --gpu h200 --price 1,2", "a price for each GPU"),
        ("mpt-7b --gpu h200 --sweep --days 3", "only with --tokens"),
        ("mpt-7b --gpu h200 --goal 3", "only with --sweep"),
        ("mpt-7b --gpu h200 --set model=mpt-13b", "no such field"),
        ("mpt-7b --gpu h200 --measured tokens_per_second=400000", "more than the data sheet allows"),
        ("mpt-7b --gpu h200 --measured nodes=1", "a run has a speed"),
        ("mpt-7b --gpu h200 --measured README.md", "the log says no speed"),
        ("no/config.json --gpu h200", "no config.json of a model"),
        ("mpt-7b --gpu h200 --nodes 5 --network 800 --sweep --software foundry-2023-10", "no layout divides"),
    ],
)
def test_what_cannot_be_asked_is_refused(asked: str, words: str) -> None:
    done = invoke(ROOT, "predict", *asked.split())
    assert done.returncode == 2
    assert words in done.stderr
