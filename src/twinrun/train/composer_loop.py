"""A point of a training sweep through Composer: a model at a fixed global batch on some devices."""

from __future__ import annotations

from twinrun.protocol.training import TrainingJob, TrainingResult
from twinrun.train import attention, composer_adapter, worker
from twinrun.train.data import load_batches, load_corpus
from twinrun.train.device import device_of
from twinrun.train.metrics import Meter


def train(job: TrainingJob) -> TrainingResult:
    """Train for the job's steps; return what was measured."""
    composer_adapter.start(job)
    device = device_of(job)
    corpus = load_corpus(job)

    kernel = worker.choose_attention(job, device)
    model = worker.build_model(job, device)
    weights_hash = worker.digest_of(model)
    meter = Meter(job, device)
    trainer = composer_adapter.build_trainer(job, model=model, batches=load_batches(job, corpus), meter=meter)
    with attention.only(kernel):
        composer_adapter.fit(trainer, job, model=model, corpus=corpus, meter=meter)

    return worker.collect(
        job,
        meter=meter,
        device=device,
        kernel=kernel,
        parallelism=composer_adapter.parallelism(job),
        data_hash=corpus.sha256,
        weights_hash=weights_hash,
    )
