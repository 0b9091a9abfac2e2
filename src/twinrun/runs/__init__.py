"""A run from what was asked for to its record: select, plan, execute, judge."""
