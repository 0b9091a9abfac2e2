"""The claims about one record, judged as published, and where that cannot be asked, as said here."""

from __future__ import annotations

from twinrun.foundation.files import canonical_json, sha256_of_bytes
from twinrun.manifests.claims import Claim, PublishedHardware, placeholders_of
from twinrun.manifests.published import PublishedClaims
from twinrun.planning.project import Project
from twinrun.results.conditions import Answer, Findings, answered
from twinrun.results.evidence import JudgeContext
from twinrun.results.question import Question, departures_of
from twinrun.results.record import Record
from twinrun.results.verdicts import (
    Condition,
    RestatementVerdict,
    Verdict,
    as_published,
    as_restated,
    measured_here,
    published_here,
)

# Counts up when the same record and claims are given another verdict. 2: a claim of any kind is reproduced
# on the published hardware and configuration alone, never at smoke scale. 3: every point is held against the
# reference first; curves must fall and go beyond the warm-up; cards, nodes and what is possible are judged.
# 4: a verdict is its list of conditions; a claim is judged at its own case; intervals decide, or do not.
RULES = 4


def judge(record: Record, published: PublishedClaims, project: Project) -> tuple[Verdict, ...]:
    """Judge every claim against `record`, in the published order; where that cannot be, as restated."""
    return verdicts_on(record, published, project, Findings.of(record, project))


def verdicts_on(
    record: Record, published: PublishedClaims, project: Project, findings: Findings
) -> tuple[Verdict, ...]:
    """Judge every claim against a record that was looked at before."""
    recipe = project.recipe(record.plan.recipe).model_copy(update={"published": published})
    terms = JudgeContext(metrics=project.metrics, gpus=project.gpus, recipe=recipe)
    return tuple(_judged(claim, record, terms, findings) for claim in published.claim)


def claims_digest(published: PublishedClaims) -> str:
    """Return the digest of all that verdicts depend on in published.toml."""
    kept = {"claim", "fingerprint"} | {
        name for name in ("configurations", "neutral") if getattr(published, name)
    }
    content = published.model_dump(mode="json", include=kept)
    for claim in content["claim"]:
        # Of a score alone: records of other claims were judged before there were any.
        for field in ("configuration", "rules"):
            if not claim[field]:
                del claim[field]
    return sha256_of_bytes(canonical_json(content).encode())


def _judged(claim: Claim, record: Record, terms: JudgeContext, findings: Findings) -> Verdict:
    if unwritten := list(placeholders_of(claim.model_dump(), f"claim.{claim.id}")):
        seen = f"published.toml still contains the template's placeholder in: {', '.join(unwritten)}"
        return _verdict(claim, Answer(conditions=(Condition(name="subject", met=False, seen=seen),)), None)
    published = Question(
        claim=claim,
        record=record,
        terms=terms,
        asked=claim,
        published=True,
        hardware=_published_hardware(claim, terms.recipe.published),
    )
    answer = answered(published, findings)
    verdict = _verdict(claim, answer, published)
    here = _asked_here(published)
    if here is None or verdict.outcome not in ("not-comparable", "config-mismatch"):
        return verdict
    return verdict.model_copy(update={"here": _verdict_here(here, answered(here, findings))})


def _published_hardware(claim: Claim, published: PublishedClaims) -> tuple[PublishedHardware, ...]:
    """Return the hardware of a claim, else that of all claims; none of a score, which belongs to weights."""
    if claim.kind == "score":
        return ()
    return tuple(one.hardware for one in ((claim,) if claim.hardware else published.claim) if one.hardware)


def _asked_here(published: Question) -> Question | None:
    """Return what a claim asks anywhere else; None where it says nothing there, or is of another model."""
    claim = published.claim
    if claim.here is None and claim.hardware is not None:
        return None
    return Question(
        claim=claim,
        record=published.record,
        terms=published.terms,
        asked=claim.here or claim,
        published=False,
        hardware=published.hardware,
    )


def _verdict(claim: Claim, answer: Answer, question: Question | None) -> Verdict:
    """Return the verdict as published; a value of other hardware stands in the reason alone."""
    hardware = answer.unmet is None or answer.unmet.name != "hardware"
    value = answer.value if hardware and question else None
    return Verdict(
        claim=claim.id,
        statement=claim.statement,
        outcome=as_published(answer.conditions),
        reason=answer.reason,
        published=claim.value,
        measured=question.in_unit(value) if question and value is not None else None,
        unit=claim.unit,
        per=claim.per,
        note=answer.note if value is not None else "",
        conditions=answer.conditions,
        points=tuple(point.id for point in answer.points),
    )


def _verdict_here(question: Question, answer: Answer) -> RestatementVerdict:
    metric, here = question.metric, question.restated
    value = answer.value if answer.decided else None
    verdict = RestatementVerdict(
        statement=question.asked.statement,
        outcome=as_restated(answer.conditions),
        reason=answer.reason,
        published=question.in_unit(question.reference),
        measured=None if value is None else question.in_unit(value),
        metric=metric.id,
        title=metric.title,
        unit=question.unit,
        note=answer.note if value is not None else "",
        conditions=answer.conditions,
        points=tuple(point.id for point in answer.points),
        departures=tuple(departures_of(question, answer.points)),
    )
    if here is None:
        return verdict
    if not answer.decided or not answer.comparison:
        return verdict.model_copy(update={"reason": f"Not asked, because {answer.reason}."})
    found = f"Here {measured_here(verdict)} at {answer.comparison.place}; published {published_here(verdict)}"
    said = answer.reason[:1].upper() + answer.reason[1:]
    weaker = f" Weaker than published: {here.weaker}." if here.weaker else ""
    reason = f"{found} = {here.derivation}, {here.basis}. {said}.{weaker}"
    return verdict.model_copy(update={"reason": reason})
