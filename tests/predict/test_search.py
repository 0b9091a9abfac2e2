"""The cheapest layouts on machines that are offered, and what the command refuses before it looks."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.commands import slowness
from tests.contracts.tree import ROOT
from twinrun.cli.predict import PredictRequest
from twinrun.cli.predict import predict as command
from twinrun.foundation.errors import InputError
from twinrun.planning.project import Project
from twinrun.predict.calibration import calibration
from twinrun.predict.parallel_layout import Machines, ParallelLayout
from twinrun.predict.search import Offer, Search, best
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
    prices = [one.price(1e9) for one in first.best]
    assert prices == sorted(prices)


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
    unknown = search(offer("mi250"), model="mambaoutai")
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
    assert "layouts surely fit" in capsys.readouterr().out


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
    ],
)
def test_what_cannot_be_asked_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        command(ROOT, request(**changes), as_json=False)
