"""The loop over the points of a plan: each is tried until an attempt fits into memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twinrun.execution.engine import point_folder
from twinrun.execution.ranks import Pending, Ranks, pending_of, rank_reports
from twinrun.foundation.errors import InputError, MachineError, RunError, require_equal
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import Frozen, load_json
from twinrun.foundation.text import number, percent
from twinrun.planning.plan import Plan
from twinrun.protocol.allocation import Allocation
from twinrun.protocol.job import Result
from twinrun.protocol.signals import SNIFFS, WINDOW, Sniff, alarms
from twinrun.results.judged import measured_points
from twinrun.runs.prepared import Prepared
from twinrun.runs.progress import Display
from twinrun.runs.sources import Sources, changed_since, loaded_by, when_and_what
from twinrun.workloads.workload import MeasuredPoint, Point, PointRecord, Workload


class PointOutcome(Frozen):
    """A finished point as it waits in the run folder for the others."""

    plan_sha256: str
    point: PointRecord
    allocation: Allocation
    changed: tuple[str, ...] = ()
    """Files that ranks could import which were edited while they ran."""


class Nose:
    """Reads what the ranks of one point have sniffed: the slow ones, each named once, by host."""

    def __init__(self, folder: Path) -> None:
        """Take the folder of a point."""
        self._folder = folder
        self._lines = 0
        self._told: set[tuple[int, str]] = set()

    def new(self) -> list[str]:
        """Return, in words, the slow ranks that nobody was told of."""
        file = self._folder / SNIFFS
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.is_file() else []
        sniffs = [Sniff.model_validate_json(line) for line in lines if line.endswith("\n")]
        found = []
        for end in range(self._lines + 1, len(sniffs) + 1):
            for one in alarms(sniffs[max(0, end - WINDOW) : end]):
                if (one.rank, one.kind) not in self._told:
                    self._told.add((one.rank, one.kind))
                    found.append(one.text(self._host(one.rank)))
        self._lines = len(sniffs)
        return found

    def _host(self, rank: int) -> str:
        reports = {one.rank: one.host for one in rank_reports(self._folder)}
        return reports.get(rank, "a host that has not reported")


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """Runs the points of one plan that are not finished yet."""

    prepared: Prepared
    sources: Sources
    ranks: Ranks
    display: Display

    def finish(self) -> list[PointOutcome]:
        """Run what is left and return every point, in the order of the plan.

        Raises:
            MachineError: no attempt fits into the memory of a device.
            RunError: a rank failed; names it and shows the end of its log.
        """
        plan = self.prepared.selection.plan
        done = finished(self.prepared.run, plan, workload=self.prepared.selection.workload)
        self.display.expect(len(plan.points), done=len(done))
        left = [point for point in plan.points if point.id not in done]
        for name in done:
            self.display.say(f"{name}: finished before, not run again")
        for point in left:
            outcome = self._measure(point)
            assert outcome is not None
            done[point.id] = self._kept(outcome)
        return [done[point.id] for point in plan.points]

    def submit(self) -> list[PointOutcome]:
        """Submit what is left, collect what has ended, and return the points that are finished.

        A leg waits until the one before it is collected. Raises as `finish` does.
        """
        plan, described = self.prepared.selection.plan, self.prepared.selection.description.points
        done = finished(self.prepared.run, plan, workload=self.prepared.selection.workload)
        for point in plan.points:
            leg, waiting = described[point.id].leg, pending_of(self.prepared.run, point.id)
            if point.id in done or (leg and leg.previous and leg.previous not in done):
                continue
            if waiting is None:
                self.ranks.begin(self.prepared.launch(point, 0), place=0)
            elif not self.ranks.goes_on(waiting) and (outcome := self._measure(point, detach=True)):
                done[point.id] = self._kept(outcome)
        return [done[point.id] for point in plan.points if point.id in done]

    def _kept(self, outcome: PointOutcome) -> PointOutcome:
        text = outcome.model_dump_json(indent=1) + "\n"
        write_atomically(_file(self.prepared.run, outcome.point.id), text)
        self.display.point_done()
        return outcome

    def _measure(self, point: Point, *, detach: bool = False) -> PointOutcome | None:
        """Return the outcome of a point, of an attempt that was submitted before or of a new one.

        Args:
            detach: submit another attempt where one was too large, and return None.
        """
        plan, workload = self.prepared.selection.plan, self.prepared.selection.workload
        names = self.prepared.selection.description.points[point.id].attempts
        waiting = pending_of(self.prepared.run, point.id)
        for place, name in list(enumerate(names))[waiting.place if waiting else 0 :]:
            if detach and waiting is None:
                self.ranks.begin(self.prepared.launch(point, place), place=place)
                return None
            launched = self._start(point, place, name, waiting)
            waiting = None
            if launched:
                result = _result(self.prepared.run, point, workload.result)
                folder = point_folder(self.prepared.run, point.id)
                sent = PointRecord(
                    id=point.id,
                    hosts=launched.nodes,
                    attempts=names[:place],
                    slow=tuple(Nose(folder).new()),
                    **when_and_what(loaded_by(folder)),
                    result=result,
                )
                (measured,) = measured_points(plan, (sent,), self.prepared.selection.gpu)
                self.display.end(point.id, status=summary(measured, workload.headline))
                changed = changed_since(self.prepared.run, self.sources)
                return PointOutcome(
                    plan_sha256=plan.sha256(), point=sent, allocation=launched, changed=changed
                )
            self.display.end(point.id, status=f"{name}: out of memory")
        raise MachineError(
            "nothing that was tried fits into the memory of a device",
            place=point.id,
            found=f"tried {', '.join(names)}",
            hint=workload.smaller,
        )

    def _start(self, point: Point, place: int, name: str, waiting: Pending | None) -> Allocation | None:
        workload = self.prepared.selection.workload
        started = f"goes on with job {waiting.handle}" if waiting else "starting"
        self.display.begin(
            point.id,
            steps=self.prepared.selection.description.points[point.id].steps,
            status=f"{started} {point.world_size} rank(s), {name}",
        )

        nose = Nose(point_folder(self.prepared.run, point.id))

        def show(line: bytes) -> None:
            self.display.step(point.id, workload.progress(line))
            for alarm in nose.new():
                self.display.say(f"warning: {point.id}: {alarm}")

        if waiting:
            return self.ranks.collect(point, waiting, show=show)
        return self.ranks.run(self.prepared.launch(point, place), place=place, show=show)


def finished(run: Path, plan: Plan, *, workload: Workload) -> dict[str, PointOutcome]:
    """Return the points of `plan` that are finished in a run folder."""
    files = {point.id: _file(run, point.id) for point in plan.points}
    found = {name: load_json(file, PointOutcome) for name, file in files.items() if file.is_file()}
    return {
        name: one.model_copy(update={"point": workload.read_results((one.point,))[0]})
        for name, one in found.items()
        if one.plan_sha256 == plan.sha256()
    }


def summary(point: MeasuredPoint, headline: tuple[str, ...]) -> str:
    """Return the result of a point in one line: the first number that stands for it, and its last loss."""
    shown = [one for metric in headline for one in point.measurements if one.metric == metric][:2]
    parts = [
        f"{one.id} "
        + (percent(one.median) if one.metric.endswith("-share") else f"{number(one.median)} {one.unit}")
        for one in shown
    ]
    parts += [f"{one.id} {one.values[-1]:.4f}" for one in point.series if one.values]
    failed = [one.id for one in point.checks if one.outcome != "pass"]
    return ", ".join([*parts, *(f"not passed: {name}" for name in failed)]) or "measured"


def _result(run: Path, point: Point, model: type[Result]) -> Result:
    """Return what the ranks of `point` left; raises RunError where that is not a whole result of it."""
    file = point_folder(run, point.id) / "result.json"
    try:
        result = load_json(file, model)
    except InputError as error:
        message = "the ranks ended well and left no whole result"
        raise RunError(message, place=str(file), found=f"{error.message}: {error.found}") from None
    message = "the ranks left the result of another point"
    require_equal(result.point, point.id, message, place=str(file), error=RunError)
    return result


def _file(run: Path, point: str) -> Path:
    return run / "points" / f"{point}.json"
