"""A finished run in the forms of other programs: experiment trackers, the MLPerf log, an RO-Crate."""
