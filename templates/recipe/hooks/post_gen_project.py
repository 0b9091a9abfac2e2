"""Moves the new recipe to recipes/ and says what of it is a placeholder; runs in the new folder."""

import shutil
from pathlib import Path

NAME = {{ cookiecutter.name | tojson }}
CHECKOUT = Path({{ cookiecutter.__checkout | tojson }})

made = Path.cwd()
# A folder of recipes may be named with --output-dir; anything else is where cookiecutter was started.
folder = made.parent if made.parent.name == "recipes" else CHECKOUT / "recipes"
shutil.move(made, folder / NAME)

place = f"recipes/{NAME}" if folder == CHECKOUT / "recipes" else folder / NAME
print(f"""{place} runs as it stands. What it says of the publication are placeholders; edit three files:
  recipe.toml     question, publication, the fields of its experiment, and what each scale runs
  published.toml  claims with values, tolerances and sources, the fingerprint, and what is missing
  README.md       purpose, deviations, and what is missing
then look at the plan and hold the folder to the rules:
  invoke run {place} --scale paper --dry
  nox -s contracts""")
