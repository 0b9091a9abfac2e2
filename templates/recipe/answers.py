"""Refuses answers that no recipe can have, before anything is written.

Cookiecutter shows the failure of an extension as one line, and that of a hook with a traceback.
"""

import difflib
import re
import tomllib
from pathlib import Path

from cookiecutter.exceptions import FailedHookException
from jinja2 import Environment
from jinja2.ext import Extension

CHECKOUT = Path(__file__).resolve().parents[2]
WORKLOADS = ("training", "bench", "checks", "evaluation")


def refuse(key: str, found: str, allowed: str) -> None:
    """End with what is wrong, in the words of every other wrong input."""
    shown = found if len(found) <= 80 else f"{found[:80]}..."
    raise FailedHookException(f"error: {key}: found {shown!r}, allowed: {allowed}")


def check(answers: dict[str, str]) -> str:
    """Return the checkout that the recipe is for; raises FailedHookException for what no recipe can have."""
    name, gpu = answers["name"], answers["gpu"]
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) or len(name) > 80:
        refuse("name", name, "lower-case letters and digits joined by hyphens, at most 80")
    if (CHECKOUT / "recipes" / name).exists():
        refuse("name", name, "a name that no folder of recipes/ has yet")
    if answers["workload"] not in WORKLOADS:
        refuse("workload", answers["workload"], ", ".join(WORKLOADS))
    for key in ("title", "publication_title"):
        if not answers[key].strip() or re.search(r"[\x00-\x1f\x7f]", answers[key]):
            refuse(key, answers[key], "one line of text")
    gpus = tomllib.loads((CHECKOUT / "images" / "gpus.toml").read_text(encoding="utf-8"))["gpu"]
    known = [row["id"] for row in gpus]
    if gpu not in known:
        nearest = [one for one in known if one.startswith(f"{gpu}-")]
        nearest += difflib.get_close_matches(gpu, known, 1)
        refuse("gpu", gpu, ", ".join(known) + (f"; did you mean {nearest[0]}?" if nearest else ""))
    return str(CHECKOUT)


class Answers(Extension):
    """Makes `check` a filter of the template's questions."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        environment.filters["check"] = check
