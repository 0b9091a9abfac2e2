"""Says what of the new recipe is a placeholder, and how to go on; runs in the new folder."""

NAME = {{ cookiecutter.name | tojson }}

print(f"""recipes/{NAME} runs as it stands. What it says of the publication are placeholders; edit three files:
  recipe.toml     question, publication, the fields of its experiment, and what each scale runs
  published.toml  claims with values, tolerances and sources, the fingerprint, and what is missing
  README.md       purpose, deviations, and what is missing
then look at the plan and hold the folder to the rules:
  invoke run recipes/{NAME} --scale paper --dry
  nox -s contracts""")
