"""The site in a browser, at the widths of a telephone, a tablet and a desk, light and dark."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

from tests.report.browser import Browser
from tests.report.committed import ROOT

pytestmark = pytest.mark.needs("chromium", "mkdocs", "axe_core_python")

WIDTHS = (390, 1000, 1400)
# Colours are the same on all pages of a kind, and one of each kind is held to the rules of accessibility.
KINDS = (
    *("index.html", "guides/run-an-experiment/index.html", "reference/commands/index.html"),
    *("results/index.html", "results/hardware/index.html", "results/hardware/mpt-7b/index.html"),
    *("results/cluster-acceptance.html", "results/predictions/index.html"),
    "results/publications/002/index.html",
)
AXE = """axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations.map(one =>
  `${one.id}: ${one.nodes.slice(0, 3).map(node => node.html.slice(0, 90))}`))"""
MOST_BYTES = 300_000
LINK = re.compile(r'\b(?:href|src)="([^"]*)"')
IDENTIFIER = re.compile(r'\bid="?([^\s">]+)')
# What a reader would see go wrong: the page wider than the screen, text cut off at the edge of what holds it
# where that cannot be scrolled, and texts of a picture that lie over each other.
FAULTS = """(() => {
  const found = [], root = document.documentElement;
  if (root.scrollWidth > innerWidth) found.push(`${root.scrollWidth} pixels wide`);
  for (const one of document.querySelectorAll("body > main *, .md-content *")) {
    const hides = ["hidden", "clip"].includes(getComputedStyle(one).overflowX);
    if (hides && one.clientWidth > 1 && one.scrollWidth > one.clientWidth + 1 && one.innerText)
      found.push(`cut off: ${one.innerText.slice(0, 40)}`);
  }
  for (const picture of document.querySelectorAll("figure > svg")) {
    const whole = picture.getBoundingClientRect();
    const texts = [...picture.querySelectorAll("text")]
      .map(one => [one.textContent, one.getBoundingClientRect()]);
    texts.forEach(([said, box], place) => {
      if (!box.width) return;
      if (box.left < whole.left - 2 || box.right > whole.right + 2)
        found.push(`outside its picture: ${said}`);
      for (const [other, its] of texts.slice(place + 1)) {
        const across = Math.min(box.right, its.right) - Math.max(box.left, its.left);
        const down = Math.min(box.bottom, its.bottom) - Math.max(box.top, its.top);
        if (across > 2 && down > box.height / 3) found.push(`${said} over ${other}`);
      }
    });
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/src"}
    command = ("mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder))
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as one:
        yield one


def pages(site: Path) -> list[Path]:
    return sorted(page for page in site.rglob("*.html") if page.name != "404.html")


def test_no_page_is_wider_than_its_screen_or_has_a_text_that_cannot_be_read(
    site: Path, browser: Browser
) -> None:
    # Of the records of a recipe, whose pages are alike, the newest.
    records = sorted((one for one in pages(site) if one.stem.isdecimal()), key=lambda one: int(one.stem))
    newest, found = {page.parent: page for page in records}.values(), {}
    for page in (*(one for one in pages(site) if one not in records), *newest):
        browser.visit(page)
        # A colour scheme moves nothing.
        for width in WIDTHS:
            browser.look(width=width, scheme="light")
            if faults := browser.value(FAULTS):
                found[f"{page.relative_to(site)}, {width}"] = faults
    assert not found


@pytest.mark.parametrize(("width", "scheme"), [(WIDTHS[0], "light"), (WIDTHS[-1], "dark")])
def test_pages_keep_the_rules_of_accessibility(site: Path, browser: Browser, width: int, scheme: str) -> None:
    package = find_spec("axe_core_python")
    assert package is not None
    rules = Path(str(package.origin)).with_name("axe.min.js").read_text(encoding="utf-8")
    found = {}
    browser.look(width=width, scheme=scheme)
    for name in KINDS:
        browser.visit(site / name)
        browser.value(f"{rules}; 0")
        if faults := browser.value(AXE):
            found[name] = faults
    assert not found


def test_no_page_is_heavy_and_every_link_leads_somewhere(site: Path) -> None:
    texts = {page: page.read_text(encoding="utf-8") for page in pages(site)}
    assert not {str(page): len(text) for page, text in texts.items() if len(text.encode()) > MOST_BYTES}
    names = {page: set(IDENTIFIER.findall(text)) for page, text in texts.items()}
    broken = []
    for page, link in ((page, link) for page, text in texts.items() for link in set(LINK.findall(text))):
        address, fragment = urldefrag(link)
        if re.match(r"[a-z]+:|//", address) or link in {"", "."}:
            continue
        target = (page.parent / unquote(address)).resolve() if address else page
        target = target / "index.html" if target.is_dir() else target
        if not target.exists() or (fragment and target in names and fragment not in names[target]):
            broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken
