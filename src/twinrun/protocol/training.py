"""What one training run is: the only settings both the host and the ranks read."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from twinrun.foundation.manifest import Frozen
from twinrun.protocol.job import Job, PowerReading, PowerSource, Result
from twinrun.protocol.layout import Arithmetic, Layout
from twinrun.protocol.measurements import Per
from twinrun.protocol.models import AnyShape
from twinrun.protocol.models.shape import ActivationCheckpointing, Positive

Sharding = Literal["none", "full"]
"""`none` replicates (DDP); `full` shards parameters, gradients and optimizer state (FSDP)."""
COMPOSER, PLAIN = "composer", "plain"
Reduction = Literal["microbatch", "step"]
Fp8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
"""Names of torchao: one scale a tensor; one a row; one a row, and gradients of weights in bf16."""
FP8_RECIPE: Fp8Recipe = "tensorwise"
NotNegative = Annotated[int, Field(ge=0)]


class TokenSchedule(Frozen):
    """Learning rate by tokens trained on: linear warm-up, stable, linear decay that ends at the minimum."""

    warmup: NotNegative
    """Tokens of the warm-up."""
    total: Positive
    """Tokens at which a decay without a minimum would reach zero."""
    decay: NotNegative
    """Tokens of that decay."""

    @model_validator(mode="after")
    def _in_order(self) -> TokenSchedule:
        if self.warmup + self.decay > self.total:
            raise ValueError("`warmup` and `decay` are more tokens together than `total`")
        return self


Moment = Annotated[float, Field(ge=0, lt=1)]


class Optimizer(Frozen):
    """AdamW, with warm-up and cosine decay in steps or with a schedule in tokens."""

    learning_rate: Annotated[float, Field(gt=0)]
    betas: tuple[Moment, Moment] = (0.9, 0.95)
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    decayed: Literal["all", "matrices"] = "all"
    """Parameters that decay: one group of all, or the weights of embeddings and matrix products alone."""
    warmup_steps: NotNegative | None = None
    decay_steps: Positive | None = None
    """Steps until the learning rate has reached `final_factor`, warm-up included."""
    schedule: TokenSchedule | None = None
    """In place of the two above: warm-up, stable, decay in tokens."""
    final_factor: Annotated[float, Field(ge=0, le=1)] = 0.1
    gradient_clip: Annotated[float, Field(gt=0)] = 1.0
    """Largest global gradient norm."""

    @model_validator(mode="after")
    def _one_schedule(self) -> Optimizer:
        steps = (self.warmup_steps, self.decay_steps)
        if self.schedule is None and None in steps:
            raise ValueError("give `warmup_steps` and `decay_steps`, or a `schedule` in tokens")
        if self.schedule is not None and steps != (None, None):
            raise ValueError("a `schedule` in tokens takes the place of `warmup_steps` and `decay_steps`")
        return self


class Validation(Frozen):
    """When the loss is taken on which other sequences; after step 250 it is `validation-loss@250`."""

    data: str
    """Name of one of the recipe's data sets."""
    every: Positive
    """Optimizer steps between two; the last step has one too."""
    sequences: Positive
    """The first so many of the data."""

    def due(self, step: int, *, steps: int) -> bool:
        """Say whether there is one after `step` of `steps` optimizer steps."""
        return step == steps or (0 < step < steps and step % self.every == 0)


class Training(Frozen):
    """A training configuration, whatever it runs on."""

    model: str
    """Name of one of the recipe's models."""
    data: str
    """Name of one of the recipe's data sets."""
    global_batch: Positive
    """Sequences in one optimizer step over all devices together."""
    microbatch: Positive | Literal["auto"] = "auto"
    """Sequences in one forward pass of one device; `auto` takes the largest that fits."""
    precision: Arithmetic = "bf16"
    """Arithmetic of the layers; `fp8` multiplies matrices of blocks by a recipe of torchao's."""
    fp8_recipe: Fp8Recipe = FP8_RECIPE
    """What has a scale of its own in fp8: a tensor, a row, or a row with gradients of weights in bf16."""
    parameter_type: Literal["fp32", "bf16"] = "fp32"
    """Type that parameters, gradients and optimizer state are kept in."""
    sharding: Sharding
    """`none` replicates (DDP); `full` shards parameters, gradients and optimizer state (FSDP)."""
    reduction: Reduction = "microbatch"
    """When `full` sharding gathers parameters and reduces gradients: for every microbatch, or once a step.

    Once a step communicates less and keeps 6 bytes a parameter more: gathered parameters, and a sum of
    gradients in fp32.
    """
    attention: Literal["sdpa", "triton", "math"] = "sdpa"
    """`sdpa` takes PyTorch's fastest fused kernel; `triton` is the kernel of the recipe `flash-attention`,
    interpreted on a processor; `math` is the written-out formula."""
    kernels: Literal["ours", "upstream", "reference"] | None = None
    """Who computes scan and convolution of a state-space model: the kernels that the recipe carries,
    mamba_ssm and causal_conv1d, or operations of torch."""
    layout: Literal["token-major", "channel-first"] | None = None
    """What is adjacent in memory where a state-space model scans: channels of a token, or tokens."""
    position_weighting: Annotated[float, Field(gt=0)] | None = None
    """Loss of a token times tanh(its position over this), over the sum of these weights."""
    activation_checkpointing: ActivationCheckpointing = False
    """Recompute each block in the backward pass instead of keeping its activations; `selective` keeps the
    results of matrix products and of attention, `selective-alternate` those of attention and of every other
    product, as torchtitan does."""
    trainer: str = COMPOSER
    """`composer`; `plain`, a loop in PyTorch alone that speeds are held against; or the name of the recipe's
    `[engine]`, which trains its layouts."""
    compile: bool = True
    """Compile the blocks and the loss with torch.compile."""
    steps: Positive
    """Optimizer steps in all."""
    warmup_steps: NotNegative
    """First steps that are trained but not timed."""
    seed: NotNegative = 17
    controls: NotNegative = 0
    """Control runs of the first point: the same again, samples and features summed in other orders.

    How far their losses are apart is what rounding does, and the envelope of a parity; eight or more.
    """
    trace: bool = False
    """Write digests of weights, activations and gradients by step and layer, in which `invoke parity --trace`
    finds where two runs begin to differ. Nothing may be compiled, since a compiled graph has no layers."""
    reports: dict[str, str] = Field(default_factory=dict)
    """Further metrics that the script reports, each with its unit; rows of recipes/metrics.toml, or of a file
    `metrics.toml` beside recipe.toml."""
    validation: Validation | None = None
    """The loss on other data than is trained on; none is taken where not given."""
    optimizer: Optimizer

    @field_validator("warmup_steps")
    @classmethod
    def _some_timed(cls, count: int, read: ValidationInfo) -> int:
        if count >= read.data.get("steps", count + 1):
            raise ValueError(f"no step would be timed: fewer than {read.data['steps']}, the steps, warm up")
        return count

    @model_validator(mode="after")
    def _traced_by_layers(self) -> Training:
        if self.trace and self.compile:
            raise ValueError("`trace` needs `compile = false`: a compiled graph has no layers")
        return self


def identity(shape: AnyShape, training: Training) -> dict[str, str]:
    """Return the settings that decide the loss, as a checkpoint keeps them; its data comes beside them."""
    return {
        **{f"shape.{name}": str(value) for name, value in shape.model_dump().items()},
        **{f"optimizer.{name}": str(value) for name, value in training.optimizer.model_dump().items()},
        "precision": training.precision,
        **({"fp8_recipe": training.fp8_recipe} if training.precision == "fp8" else {}),
        "seed": str(training.seed),
        "global_batch": str(training.global_batch),
    }


# Endings of the files of each form; a compressed file is one of gzip.
FORMS = {
    "json": (".json", ".jsonl", ".json.gz", ".jsonl.gz"),
    "parquet": (".parquet",),
    "text": (".txt", ".txt.gz"),
    "tokens": (".bin",),
}


class DataSource(Frozen):
    """Where token sequences come from, pinned so that two sites read the same bytes."""

    kind: Literal["standard-library", "hugging-face", "local"]
    """`standard-library`: sources of the running interpreter as bytes. `hugging-face`: files of a repository.
    `local`: files of a folder of this machine."""
    repository: str | None = None
    """Dataset repository, for example `allenai/c4`."""
    revision: str | None = None
    """Commit of the dataset repository."""
    files: str | None = None
    """Shell pattern of the files inside the repository or the folder."""
    folder: str | None = None
    """Local folder, absolute or relative to the recipe's."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """SHA-256 over sorted lines `name sha256` of the local files; `invoke data` says it."""
    form: Literal["json", "parquet", "text", "tokens"] = "json"
    """`json`: an object a line. `parquet`: a table. `text`: a document a file. `tokens`: little-endian
    numbers after a header."""
    column: str = "text"
    """Key or column of the text."""
    header_bytes: NotNegative = 0
    """Bytes before the first token of a file of tokens: 1024 for llm.c, 0 for nanoGPT."""
    end: str = "<|endoftext|>"
    """Token that follows each document."""
    width: Literal[16, 32] = 16
    """Bits of a token, in files of tokens and in what is prepared; 16 hold 65,536 numbers."""
    tokenizer: str | None = None
    """Model repository that holds `tokenizer.json`; for local data also a file of the folder."""
    tokenizer_revision: str | None = None
    """Commit of the tokenizer repository."""
    source: str | None = None
    """Who says that this is the published data."""

    @model_validator(mode="after")
    def _complete(self) -> DataSource:
        if self.kind == "standard-library":
            return self
        where = ("repository", "revision") if self.kind == "hugging-face" else ("folder", "sha256")
        needed = [*where, "files", *([] if self.form == "tokens" else ["tokenizer"])]
        if self.kind == "hugging-face" and self.form != "tokens":
            needed.append("tokenizer_revision")
        if missing := [name for name in needed if getattr(self, name) is None]:
            kind = f"data of kind `{self.kind}` and form `{self.form}`"
            raise ValueError(f"{kind} also needs: {', '.join(missing)}")
        for name in ("revision", "tokenizer_revision"):
            if (commit := getattr(self, name)) and not re.fullmatch("[0-9a-f]{40}", commit):
                what = f"`{name}` is a commit of 40 digits, which no branch or tag is"
                raise ValueError(f"{what}; found `{commit}`")
        if not (self.files or "").endswith(FORMS[self.form]):
            allowed = ", ".join(FORMS[self.form])
            raise ValueError(f"files of the form `{self.form}` end with {allowed}; found `{self.files}`")
        return self


class TrainingJob(Job):
    """One point of a sweep."""

    shape: AnyShape
    training: Training
    microbatch: Positive
    """Sequences in one forward pass of one device, resolved."""
    sharding: Sharding
    """Sharding of the training; `none` for a single device with nothing to compare with."""
    layout: Layout | None = None
    """How the ranks share the work where that is more than sharding."""
    data: str
    """Folder of prepared shards."""
    validation_data: str = ""
    """Folder of prepared shards that nothing is trained on; empty where there is no validation."""
    control: NotNegative = 0
    """Which control run this is; 0 is the run itself."""
    power: PowerReading | None = None
    """How power is read; null reads none."""

    @property
    def replicas(self) -> int:
        """Ranks with consecutive numbers that read the same sequences."""
        return self.layout.replicas if self.layout else 1

    @property
    def device_batch(self) -> int:
        """Sequences one device processes in one optimizer step."""
        return self.training.global_batch * self.replicas // self.world_size

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step over all devices."""
        return self.training.global_batch * self.shape.sequence

    @property
    def microbatches(self) -> int:
        """Forward passes of one device in one optimizer step."""
        return -(-self.device_batch // self.microbatch)


class Step(Frozen):
    """One optimizer step as measured."""

    step: Positive
    loss: Annotated[float, Field(lt=1e6)]
    """Mean cross entropy over the global batch, in nats per token."""
    seconds: Annotated[float, Field(gt=0, lt=1e7)]
    """Wall time of the step, the devices synchronised at both ends."""
    timed: bool
    """False for warm-up steps, also those after a start that went on from a checkpoint."""
    watts: Annotated[float, Field(ge=0)] | None = None
    """Mean power of a device during the step; null where the sensors of some device said nothing."""
    gradient_norm: Annotated[float, Field(ge=0)] | None = None
    """Global norm of the gradients before they were clipped; null where the trainer does not have it."""


class StepMetrics(Step):
    """A line of metrics.jsonl."""

    point: str
    attempt: str
    control: NotNegative = 0
    """Which control run the step is of; 0 is the run itself."""


class Report(Frozen):
    """A number that the recipe's script reports, in the unit that the training's `reports` have."""

    metric: str
    value: float
    per: Per = "run"


class TrainingResult(Result):
    """What the ranks report of one point."""

    parameters: Positive
    """Counted on the meta device."""
    microbatch: Positive
    steps: tuple[Step, ...]
    """Every step once, in order; a run that was resumed has those of all its starts."""
    peak_memory_bytes: NotNegative
    """Largest over the ranks: device memory on a GPU, resident memory on a CPU."""
    device_memory_bytes: NotNegative
    attention_backend: str
    """Which fused kernel of PyTorch ran, or `triton` or `math`."""
    parallelism: str
    """How the ranks shared the work: `single`, `ddp`, `fsdp2`, or what a layout has."""
    data_hash: str
    """SHA-256 of the prepared token stream."""
    data_server: str | None = None
    """Address that the data was fetched from, where that is known."""
    order_hash: str
    """SHA-256 over the samples of every global batch, the same at every world size."""
    fp8_recipe: str = ""
    """Library whose recipe computed in fp8, and whether the device did; empty in other precisions."""
    weights_hash: str = ""
    """Digest of the bits of all parameters that this software makes of the seed."""
    controls: tuple[tuple[float, ...], ...] = ()
    """Losses of the control runs."""
    changes: dict[str, str] = Field(default_factory=dict)
    """What the trainer changes of a framework, by the framework's name."""
    power: PowerSource
    reported: tuple[Report, ...] = ()
    """What the recipe's script reports by `Meter.report`."""
    blocked_seconds: tuple[Annotated[float, Field(ge=0)], ...] = ()
    """Seconds that the first rank's training waited for each save of its state."""
    validation: tuple[tuple[int, float], ...] = ()
    """Steps and the validation losses after them, in nats per token."""
