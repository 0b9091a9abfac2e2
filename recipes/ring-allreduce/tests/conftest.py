"""The recipe's modules are imported as its script imports them: by their names, from its folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
