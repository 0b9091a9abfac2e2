from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.checkouts import checkout
from tests.records import RECIPE
from twinrun.foundation.errors import InputError
from twinrun.manifests.recipe import LoadedRecipe, Sweep
from twinrun.planning.project import Project

SMALL_MODEL = '{ family = "mpt", width = 8, heads = 1, layers = 1, vocabulary = 8, sequence = 8 }'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root with a copy of the recipe."""
    return checkout(tmp_path, RECIPE)


def load_recipe(root: Path, name: str) -> LoadedRecipe:
    return Project(root).recipe(name)


def find_recipes(root: Path) -> dict[str, LoadedRecipe]:
    return Project(root).recipes()


def change(root: Path, old: str, new: str) -> None:
    path = root / "recipes" / RECIPE / "recipe.toml"
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_every_folder_is_found_under_its_name(root: Path) -> None:
    found = find_recipes(root)
    # The recipe comes with the one whose kernels it names.
    assert list(found) == ["flash-attention", RECIPE]
    assert found[RECIPE].folder == f"recipes/{RECIPE}"


def test_a_folder_without_manifest_is_told_not_skipped(root: Path) -> None:
    (root / "recipes" / "half-made").mkdir()
    with pytest.raises(InputError, match="half-made"):
        find_recipes(root)


@pytest.mark.parametrize("name", [RECIPE, f"recipes/{RECIPE}", f"recipes/{RECIPE}/", f"./recipes/{RECIPE}"])
def test_a_name_and_a_path_mean_the_same(root: Path, name: str) -> None:
    assert load_recipe(root, name) == load_recipe(root, RECIPE)


def test_the_absolute_path_and_one_from_here_are_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = root / "recipes" / RECIPE
    assert load_recipe(root, str(folder)).folder == f"recipes/{RECIPE}"
    monkeypatch.chdir(folder.parent)
    assert load_recipe(root, f"./{RECIPE}/").folder == f"recipes/{RECIPE}"


@pytest.mark.parametrize("name", ["mpt7b-scalling", "recipes/mpt7b-scalling"])
def test_an_unknown_recipe_is_told_with_the_nearest(root: Path, name: str) -> None:
    with pytest.raises(InputError, match="unknown recipe") as caught:
        load_recipe(root, name)
    assert caught.value.allowed == ["recipes/flash-attention", f"recipes/{RECIPE}"]
    assert caught.value.hint == f"did you mean `{RECIPE}`?"


@pytest.mark.parametrize("name", [f"../{RECIPE}", f"/srv/{RECIPE}", f"elsewhere/{RECIPE}", "", ".", ".."])
def test_a_path_outside_is_no_recipe_even_of_a_known_name(root: Path, name: str) -> None:
    with pytest.raises(InputError, match="unknown recipe"):
        load_recipe(root, name)


def test_a_copy_elsewhere_does_not_stand_for_the_recipe(root: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(root / "recipes" / RECIPE, tmp_path / "mine" / RECIPE)
    with pytest.raises(InputError, match="two recipes of one name"):
        load_recipe(root, str(copy))


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        (f'name = "{RECIPE}"', 'name = "mpt7b"', "name"),
        ('model = "mpt-7b"', 'model = "mpt-8b"', "training.model"),
        ('data = "c4"', 'data = "c5"', "training.data"),
        ('models = ["mpt-7b",', 'models = ["mpt-7c",', "scales.node.models"),
        ('"mpt-125m",\n  ', '"mpt-125n",\n  ', "members"),
        ("[data.c4]", f"[models]\nmpt-7b = {SMALL_MODEL}\n[data.c4]", "models.mpt-7b"),
        ("[scales.paper]", "[scales.papers]", "scales.papers"),
        ("version = 3\n", 'version = 3\nscript = "absent.py"\n', "script"),
        ("\nversion = ", "\nversion = -", "version"),
        (
            "learning_rate = 1.2e-4",
            'learning_rate = 1.2e-4\nschedule = "cosine"',
            "training.optimizer.schedule",
        ),
    ],
)
def test_names_are_held_against_each_other(root: Path, old: str, new: str, key: str) -> None:
    change(root, old, new)
    with pytest.raises(InputError) as caught:
        load_recipe(root, RECIPE)
    assert str(caught.value.place).endswith(f"recipes/{RECIPE}/recipe.toml:{key}")


def test_a_scale_that_is_not_there_is_told(root: Path) -> None:
    change(root, '[scales.paper]\nsummary = "as published: 4 to 128 MI250 cards, 8 to 256 devices"\n', "")
    change(root, "sweep = { nodes = [1, 2, 4, 8, 16, 32], devices_per_node = 8 }\n", "")
    with pytest.raises(InputError, match=r"recipe\.toml:scales\.paper: this key is required"):
        load_recipe(root, RECIPE)


def test_the_folder_one_stands_in_is_a_recipe(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / "recipes" / RECIPE)
    assert load_recipe(root, ".").recipe.name == RECIPE


@pytest.mark.parametrize("tables", ["", "[bench]\nwarmup = 1\nrepeats = 1\n"])
def test_a_recipe_has_the_table_of_one_workload(root: Path, tables: str) -> None:
    path = root / "recipes" / RECIPE / "recipe.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text + tables if tables else text.replace("[training", "[trianing"), encoding="utf-8")
    with pytest.raises(InputError, match="exactly one workload") as caught:
        load_recipe(root, RECIPE)
    assert caught.value.allowed == ["[bench]", "[checks]", "[evaluation]", "[training]"]


@pytest.mark.parametrize(
    ("old", "new", "key", "hint"),
    [
        ("global_batch = 1536", "global_bacth = 1536", "training.global_bacth", "global_batch"),
        ("version = 3\n", 'version = 3\nscirpt = "a.py"\n', "scirpt", "script"),
        ("learning_rate = 1.2e-4", "lr = 1.2e-4", "training.optimizer.lr", "learning_rate"),
        ("summary = ", "sumary = ", "scales.smoke.sumary", "summary"),
    ],
)
def test_a_misspelt_key_is_unknown_and_not_required(
    root: Path, old: str, new: str, key: str, hint: str
) -> None:
    change(root, old, new)
    with pytest.raises(InputError, match="unknown key") as caught:
        load_recipe(root, RECIPE)
    assert str(caught.value.place).endswith(f"recipe.toml:{key}")
    assert caught.value.hint == f"did you mean `{hint}`?"


def test_a_manifest_is_read_once(root: Path) -> None:
    project = Project(root)
    before = project.recipe(RECIPE)
    change(root, f'name = "{RECIPE}"', 'name = "broken"')
    assert project.recipe(RECIPE) is before


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


@pytest.mark.parametrize("script", ["../other.py", "/etc/hostname", "x" * 300])
def test_a_script_stands_in_the_folder_of_the_recipe(root: Path, script: str) -> None:
    (root / "recipes" / "other.py").touch()
    change(root, "version = 3\n", f'version = 3\nscript = "{script}"\n')
    with pytest.raises(InputError, match=r"recipe\.toml:script"):
        load_recipe(root, RECIPE)


def test_a_name_too_long_for_a_file_is_unknown(root: Path) -> None:
    with pytest.raises(InputError, match="unknown recipe"):
        load_recipe(root, "x" * 300)
