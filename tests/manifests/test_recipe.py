from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkouts import checkout
from tests.records import RECIPE, plan
from twinrun.foundation.errors import InputError
from twinrun.manifests.recipe import Sweep
from twinrun.planning.project import Project

SMALL_MODEL = '{ family = "mpt", width = 8, heads = 1, layers = 1, vocabulary = 8, sequence = 8 }'
SCRIPTS = ("absent.py", "../other.py", "/etc/hostname", "x" * 300)
NAMED, VERSION, RATE = f'name = "{RECIPE}"', "version = 3\n", "learning_rate = 1.2e-4"
RING, GPT2, LOSS = "ring-allreduce", "gpt2-reproduction", "validation-loss@18865"
# Recipe, what stands in its files, what stands there instead, the key that is named, and what is said of it.
BROKEN = [
    (RECIPE, NAMED, 'name = "mpt7b"', "name", ""),
    (RECIPE, 'model = "mpt-7b"', 'model = "mpt-8b"', "training.model", ""),
    (RECIPE, 'data = "c4"', 'data = "c5"', "training.data", ""),
    (RECIPE, 'models = ["mpt-7b",', 'models = ["mpt-7c",', "scales.node.models", ""),
    (RECIPE, '"mpt-125m",\n  ', '"mpt-125n",\n  ', "members", ""),
    (RECIPE, "[data.c4]", f"[models]\nmpt-7b = {SMALL_MODEL}\n[data.c4]", "models.mpt-7b", ""),
    (RECIPE, "[scales.paper]", "[scales.papers]", "scales.papers", ""),
    (RECIPE, "\nversion = ", "\nversion = -", "version", ""),
    (RECIPE, RATE, f'{RATE}\nschedule = "cosine"', "training.optimizer.schedule", ""),
    *((RECIPE, VERSION, f'{VERSION}script = "{one}"\n', "script", "") for one in SCRIPTS),
    (RECIPE, "global_batch = 1536", "global_bacth = 1536", "training.global_bacth", "mean `global_batch`"),
    (RECIPE, VERSION, f'{VERSION}scirpt = "a.py"\n', "scirpt", "did you mean `script`"),
    (RECIPE, RATE, "lr = 1.2e-4", "training.optimizer.lr", "did you mean `learning_rate`"),
    (RECIPE, "summary = ", "sumary = ", "scales.smoke.sumary", "did you mean `summary`"),
    (RECIPE, '"optimizer.decay_steps"', '"optimizer.decay"', "set.optimizer.decay", "no such field"),
    (RECIPE, VERSION, f"{VERSION}[bench]\nwarmup = 1\nrepeats = 1\n", "", "exactly one workload"),
    (RING, 'compressions = ["bf16"', 'compressions = ["tree"', "cases.64KB.compressions", "tree"),
    (RING, 'algorithms = ["ring"', 'algorithms = ["tree"', "bench.options.algorithms", "tree"),
    (RING, "in_flight = 4", "in_flight = 0", "bench.options.in_flight", "0"),
    (RING, "in_flight = 1", "in_fligth = 1", "at_least", "in_fligth"),
    (RING, "in_flight = 1", "dtypes = 1", "at_least", "dtypes"),
    (GPT2, f'"{LOSS}"', '"validation-loss@18864"', "", "validation-loss is called validation-loss@"),
    (GPT2, "karpathy/nanoGPT@9755682b981a", "karpathy/nanoGPT", "fails_when", "a source is a publication"),
    (GPT2, 'free = ["microbatch"]', 'free = ["validation"]', "", "validation-loss depends on this field"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with a copy of the recipe."""
    return checkout(tmp_path, RECIPE)


def test_a_name_and_any_path_of_the_folder_mean_the_same(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, project = root / "recipes" / RECIPE, Project(root)
    found = project.recipe(RECIPE)
    for name in (f"recipes/{RECIPE}", f"recipes/{RECIPE}/", f"./recipes/{RECIPE}", str(folder)):
        assert project.recipe(name) is found
    for here, name in ((folder.parent, f"./{RECIPE}/"), (folder, ".")):
        monkeypatch.chdir(here)
        assert project.recipe(name).folder == f"recipes/{RECIPE}"


def test_every_folder_is_found_under_its_name(root: Path) -> None:
    found = Project(root).recipes()
    # The recipe comes with the one whose kernels it names.
    assert list(found) == ["flash-attention", RECIPE]
    assert found[RECIPE].folder == f"recipes/{RECIPE}"


def test_a_folder_without_manifest_is_told_not_skipped(root: Path) -> None:
    (root / "recipes" / "half-made").mkdir()
    with pytest.raises(InputError, match="half-made"):
        Project(root).recipes()


@pytest.mark.parametrize("name", ["mpt7b-scalling", "recipes/mpt7b-scalling"])
def test_an_unknown_recipe_is_told_with_the_nearest(root: Path, name: str) -> None:
    with pytest.raises(InputError, match="unknown recipe") as caught:
        Project(root).recipe(name)
    assert caught.value.allowed == ["recipes/flash-attention", f"recipes/{RECIPE}"]
    assert caught.value.hint == f"did you mean `{RECIPE}`?"


@pytest.mark.parametrize(
    "name", [f"../{RECIPE}", f"/srv/{RECIPE}", f"elsewhere/{RECIPE}", "", ".", "..", "x" * 300]
)
def test_a_path_outside_is_no_recipe_even_of_a_known_name(root: Path, name: str) -> None:
    with pytest.raises(InputError, match="unknown recipe"):
        Project(root).recipe(name)


@pytest.mark.parametrize(
    ("sweep", "sizes", "others"),
    [
        (Sweep(devices=(1, 2)), ["devices=1", "devices=2"], ["devices=4", "nodes=1", "devices=", "devices"]),
        (
            Sweep(devices="powers-of-two"),
            ["devices=1", "devices=64"],
            ["devices=0", "devices=3", "devices=-2"],
        ),
        (Sweep(nodes=(1, 32), devices_per_node=8), ["nodes=32"], ["nodes=2", "devices=1", "nodes=1e0"]),
    ],
)
def test_a_sweep_knows_its_points(sweep: Sweep, sizes: list[str], others: list[str]) -> None:
    assert all(map(sweep.gives, sizes))
    assert not any(map(sweep.gives, others))


@pytest.mark.parametrize(("recipe", "old", "new", "key", "said"), BROKEN)
def test_a_recipe_whose_files_do_not_fit_names_the_key(
    tmp_path: Path, recipe: str, old: str, new: str, key: str, said: str
) -> None:
    root = checkout(tmp_path, recipe)
    (root / "recipes" / "other.py").touch()
    files = [root / "recipes" / recipe / name for name in ("recipe.toml", "published.toml")]
    path = next(one for one in files if old in one.read_text(encoding="utf-8"))
    path.write_text(path.read_text(encoding="utf-8").replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as caught:
        plan(recipe, scale="smoke", gpu=None, project=Project(root))
    assert str(caught.value.place).endswith(key)
    assert said in str(caught.value)
