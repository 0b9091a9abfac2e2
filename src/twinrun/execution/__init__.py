"""A plan carried out: engines, launchers, and the loop over points."""
