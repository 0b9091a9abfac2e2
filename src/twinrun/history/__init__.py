"""Figures over software stacks: their series, and the search for the change that moved one."""
