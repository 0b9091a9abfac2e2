"""Every direct requirement of the stack can be imported."""

from __future__ import annotations

import importlib.util
import os
import re
from importlib.metadata import packages_distributions

NEEDS = ()


def normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    wanted = os.environ["TWINRUN_REQUIREMENTS"].split()
    modules: dict[str, list[str]] = {name: [] for name in wanted}
    for module, distributions in packages_distributions().items():
        for name in {normalise(one) for one in distributions} & modules.keys():
            # Folders such as `scripts` that a wheel leaves beside its package are no modules to import.
            if importlib.util.find_spec(module) and not module.startswith("_"):
                modules[name].append(module)
    absent = [name for name, found in modules.items() if not found]
    if absent:
        raise SystemExit(f"not installed: {', '.join(absent)}")
    for name, found in modules.items():
        for module in found:
            importlib.import_module(module)
        print(f"{name}: {', '.join(found)}")


if __name__ == "__main__":
    main()
