"""The cheapest layouts on machines that are offered, and what the command refuses before it looks."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.commands import slowness
from tests.contracts.tree import ROOT
from twinrun.cli.predict import PeakRequest, PredictRequest, peak
from twinrun.cli.predict import predict as command
from twinrun.foundation.errors import InputError
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.search import Offer, Search, best, unordered
from twinrun.protocol.models import member

GPUS = Project(ROOT).gpus
KNOWN = calibration()
LIKE = ParallelLayout(global_batch=1536, microbatch=1, shards="parameters")


def offer(gpu: str = "h200", *, nodes: int = 1, price: float = 1.0) -> Offer:
    return Offer(Machines(GPUS[gpu], 8, nodes, 400e9), price)


def search(*offers: Offer, model: str = "mpt-7b", **more: Any) -> Search:
    terms: dict[str, Any] = {"software": KNOWN.of("twinrun-2026"), "calibration": KNOWN, "count": 3} | more
    return best(member(model, place="model"), offers, LIKE, **terms)


def test_the_cheapest_is_the_same_twice_and_surely_fits() -> None:
    first, again = (search(offer(nodes=4), model="mpt-13b") for _ in range(2))
    assert [one.prediction.layout for one in first.best] == [one.prediction.layout for one in again.best]
    assert first.seen > 500
    assert {one.prediction.memory.fit(GPUS["h200"]) for one in first.best} == {"FITS"}
    sure = [one.price_interval(1e9)[1] for one in first.best]
    assert sure == sorted(sure)
    answers = {
        (one.offer, one.prediction.layout.tensor, one.prediction.layout.pipeline) for one in first.best
    }
    assert len(answers) == len(first.best)


def test_no_order_is_said_of_gpus_whose_intervals_overlap() -> None:
    dear = search(offer("h200"), offer("mi300x"))
    first, second = dear.by_gpu
    even = first.price(1.0) / second.price(1.0)
    # At a price that makes both cost the same there is no order, at a tenth of it there is.
    same, cheap = (search(offer("h200"), offer("mi300x", price=even / share)) for share in (1, 10))
    assert set(unordered(same)) == {GPUS["h200"].name, GPUS["mi300x"].name}
    assert unordered(cheap) == ()
    assert {one.offer.machines.gpu.id for one in cheap.by_gpu} == {"h200", "mi300x"}


def test_what_does_not_divide_is_left_out_and_counted() -> None:
    some = search(offer(nodes=1), offer(nodes=5))
    assert [one.offer.machines.nodes for one in some.best] == [1] * len(some.best)
    assert some.left_out == (f"{GPUS['h200'].name}, 5 x 8 devices",)
    with pytest.raises(InputError, match="no layout divides"):
        search(offer(nodes=5))


def test_a_goal_asks_for_more_nodes_and_the_price_for_another_gpu() -> None:
    few, many = offer(), offer(nodes=4)
    assert search(few, many).best[0].offer == few
    goal = search(few).best[0].tokens_per_second * 1.5
    asked = search(few, many, goal=goal)
    assert {one.offer for one in asked.best} == {many}
    assert all(one.tokens_per_second >= goal for one in asked.best)
    dear, cheap = offer("h200", price=4.0), offer("h100-80gb", price=1.0)
    assert search(dear, cheap).best[0].offer == cheap


def test_what_no_layout_reaches_says_what_the_fastest_makes() -> None:
    found = search(offer(), goal=1e12)
    assert found.best == ()
    assert found.fastest
    assert found.fastest.tokens_per_second == max(one.tokens_per_second for one in search(offer()).best)
    unknown = search(offer("mi355x"), model="mambaoutai")
    assert unknown.seen == 0
    assert "selective scan" in unknown.unknown[0]


def test_ten_thousand_layouts_take_seconds() -> None:
    begin = time.process_time()
    found = search(*(offer(nodes=nodes) for nodes in (1, 2, 4)))
    taken = time.process_time() - begin
    assert found.seen > 5000
    assert taken / found.seen * 10_000 < 10 * slowness()


def request(**changes: Any) -> PredictRequest:
    asked: dict[str, Any] = {
        "subject": "mpt-7b",
        "gpus": ("h200",),
        "nodes": (1,),
        "devices_per_node": 8,
        "network": None,
        "software": "twinrun-2026",
        "settings": (),
        "sweep": False,
        "goal": None,
        "tokens": None,
        "days": None,
        "prices": (),
    }
    return PredictRequest(**asked | changes)


def test_the_command_prints_the_cheapest_of_two_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    asked = request(gpus=("h200", "h100-80gb"), prices=(9.0, 1.0), sweep=True, tokens=1e9, days=1.0)
    assert command(ROOT, asked, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goal"] == pytest.approx(1e9 / 86400)
    assert found["predictions"][0]["gpu"] == "h100-80gb"
    assert command(ROOT, asked, as_json=False) == 0
    shown = capsys.readouterr().out
    assert "layouts surely fit" in shown
    assert "512 sequences a step" in shown


def test_a_price_and_days_come_without_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(ROOT, request(prices=(3.0,), tokens=1e11, chose_devices=False), as_json=False) == 0
    shown = capsys.readouterr().out
    for words in ("days of 1e+11", "price of 1e+11", "6.66B parameters", "8 devices a node", "split (FSDP)"):
        assert words in " ".join(shown.split())


@pytest.mark.parametrize(
    ("speed", "code", "words"), [(5000.0, 0, "possible"), (61_000.0, 1, "more than the peak")]
)
def test_a_speed_is_held_against_the_peak(
    speed: float, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = PeakRequest(gpu="mi300x", model="llama-8b", tokens_per_second=speed, sequence=8192, fp8=False)
    assert peak(ROOT, asked, as_json=True) == code
    found = json.loads(capsys.readouterr().out)
    assert words in found["verdict"]
    # Megatron-LM and Megatron Bridge count 57.9 and 51.5 GFLOP a token.
    assert [round(one / 1e9, 1) for one in found["flops_of_token"].values()] == [51.5, 57.9]
    assert peak(ROOT, asked, as_json=False) == code


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"devices_per_node": 7, "settings": ("tensor=4",)}, "does not divide 7 devices"),
        ({"settings": ("global_batch=100",)}, "does not divide 100 sequences"),
        ({"settings": ("experts=16",)}, "experts are spread"),
        ({"nodes": (0,)}, "expected a count"),
        ({"nodes": (2,), "network": 0.0}, "expected a speed"),
        ({"prices": (0.0,)}, "expected an amount"),
        ({"prices": (1.0, 2.0)}, "a price for each GPU"),
        ({"sweep": True, "goal": 0.0}, "expected an amount"),
        ({"sweep": True, "days": 3.0}, "only with --tokens"),
        ({"goal": 3.0}, "only with --sweep"),
        ({"settings": ("model=mpt-13b",)}, "the model is the argument"),
        ({"settings": ("devices=4",)}, "no such field"),
        ({"settings": ("precision=fp8",), "gpus": ("mi250",)}, "no fp8"),
        ({"subject": "no/config.json"}, "no config.json of a model"),
        ({"nodes": (5,), "network": 800.0, "sweep": True}, "no layout divides"),
    ],
)
def test_what_cannot_be_asked_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        command(ROOT, request(**changes), as_json=False)
