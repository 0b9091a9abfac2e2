"""The fixtures of tests of training, where PyTorch is."""

from importlib.util import find_spec

if find_spec("torch"):
    from tests.train.small import corpus, corpus_folder, make_job  # noqa: F401 fixtures
