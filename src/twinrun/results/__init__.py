"""Records of runs, the verdicts on claims, and the comparison of records."""
