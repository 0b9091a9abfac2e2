"""The training side is tested in an environment that has a stack's packages, and nowhere else."""

from importlib.util import find_spec

if find_spec("streaming"):
    from tests.train.small import corpus, corpus_folder, make_job  # noqa: F401 fixtures
