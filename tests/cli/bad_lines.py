"""Command lines that no user should write, for every command: what `test_lines.py` runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

RECIPE = "recipes/mpt7b-scaling"
RECORD = str(Path(__file__).parents[1] / "data" / "records" / "mpt7b-scaling.json")
LONG = "a" * 5000
# Words that are no name, number or path of anything.
WORDS = (
    *("nope", "..", "/", "-1", " ", "*", LONG, "a\nb", "\x1b[31m"),
    *("\N{RIGHT-TO-LEFT OVERRIDE}", "\udcff", "größe", "$(true)", "'"),
)
# What reads as a number somewhere, and is none that a command takes.
NUMBERS = (
    "many",
    "-1",
    "1.5",
    "1e3",
    "\N{ARABIC-INDIC DIGIT THREE}",
    "0x10",
    "9" * 30,
    "9" * 5000,
    "nan",
    " 1",
)
# Files that are no record, checkpoint, submission or manifest.
FILES = (
    "absent",
    "empty",
    "folder",
    "text",
    "binary",
    "list",
    "object",
    "deep",
    "loop",
    "zero",
    "kernel",
    "pipe",
)
_PLAIN = (
    "steps =3 steps= steps==3 steps=0 steps=-1 steps=1.5 steps=nan steps=1e99 steps=true steps=[1] "
    "steps={a=1} steps=2000-01-01 stepz=3 a.b.c=1 .=1 steps.x=1 optimizer=3 optimizer.x=1 "
    "optimizer.learning_rate=x optimizer.learning_rate=-1 optimizer.learning_rate=inf "
    "optimizer.betas=[1,2] optimizer.betas=0.9 model= model=mpt-2b model=3 model=[] devices=0 "
    "devices=-1 devices=1.5 devices=1,,2 devices=all devices=[] devices=99999999 global_batch=0 "
    "global_batch=7 microbatch=0 microbatch=-4 microbatch=x precision=fp7 precision=fp8 sharding=half "
    "attention=none data=none trainer=none seed=x seed=-1 activation_checkpointing=2 layouts=zero-3 "
    "cases=none warmup_steps=99 sequence=3 "
)
SETTINGS = (*_PLAIN.split(), 'steps="3', f"steps={'9' * 5000}", "\udcff=3", "steps=\udcff")
_SAVING = (
    "steps steps=0 steps=-1 steps=x mode=soft place= place=s3:// place=ftp://x/y source= source=nowhere "
    "stepz=3 =1 mode=exact steps=3,steps=4 "
)
CHECKPOINTS = tuple(_SAVING.split())


def places(folder: Path) -> dict[str, str]:
    """Make files that are none of ours in `folder`, and return their paths by name."""
    made = {name: folder / f"{name}.json" for name in FILES}
    made["folder"].mkdir()
    made["empty"].touch()
    made["text"].write_text("not JSON", encoding="utf-8")
    made["binary"].write_bytes(bytes(range(256)))
    made["list"].write_text("[1, 2]", encoding="utf-8")
    made["object"].write_text('{"schema_version": 99, "points": []}', encoding="utf-8")
    made["deep"].write_text("[" * 100_000, encoding="utf-8")
    made["loop"].symlink_to(made["loop"].name)
    made["zero"].symlink_to("/dev/zero")
    made["kernel"].symlink_to("/proc/kmsg")
    os.mkfifo(made["pipe"])
    return {name: str(path) for name, path in made.items()}


def lines(there: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield every command line."""
    yield from _run_lines(there)
    yield from _image_lines(there)
    yield from _record_lines(there)
    yield from _other_lines(there)
    yield from _foreign_lines(there)


def _run_lines(there: dict[str, str]) -> Iterator[tuple[str, ...]]:
    plan = ("run", RECIPE, "--vendor", "cpu", "--engine", "host", "--scale", "smoke", "--dry")
    for word in (*WORDS, "recipes", f"{RECIPE}/results", f"{RECIPE}/recipe.toml", *there.values()):
        yield ("run", word, "--dry")
    for option in ("vendor", "stack", "engine", "launcher", "scheduler", "cluster", "scale"):
        for word in WORDS[:5]:
            yield ("run", RECIPE, "--dry", f"--{option}={word}")
    for word in SETTINGS:
        yield (*plan, f"--set={word}")
    for word in CHECKPOINTS:
        yield (*plan, f"--checkpoint={word}")
    for word in NUMBERS:
        yield ("run", "recipes/mpt1b-convergence", "--dry", "--engine", "host", f"--leg={word}")
    for word in WORDS[:6]:
        yield (*plan, "--leg", "1", f"--from={word}")


def _image_lines(there: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for word in WORDS:
        yield ("build", f"--stack={word}", "--dry")
        yield ("doctor", f"--stack={word}")
    for word in WORDS[:5]:
        yield ("build", f"--vendor={word}", "--dry")
        yield ("lock", f"--stack={word}", "--check")
        yield ("lock", "--stack=cpu", "--check", f"--only={word}")
        yield ("doctor", "--stack", "cpu", f"--engine={word}")
        yield ("doctor", f"--engine={word}")
        yield ("doctor", f"--cluster={word}")
        yield ("build", "--stack", "cpu", f"--pull={word}")
    for name in ("absent", "empty", "folder", "text", "loop", "zero", "pipe"):
        yield ("build", "--stack", "cpu", f"--base={there[name]}")
        yield ("build", "--stack", "cpu", f"--wheelhouse={there[name]}")
    for option in ("save", "wheelhouse", "base", "index"):
        yield ("build", "--stack", "cpu", "--dry", f"--{option}=/dev/null")
    yield ("build", "--stack", "cpu", "--sign", "key")
    yield ("build", "--stack", "cpu", "--vendor", "rocm", "--dry")


def _record_lines(there: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for path in there.values():
        yield ("compare", path, path)
        yield ("compare", "--claims", path, path)
        yield ("parity", path, path)
        yield ("parity", "--trace", path, path)
        yield ("report", path)
        yield ("report", path, "--form")
        yield ("report", RECIPE, f"--add={path}")
        yield ("checkpoint", "verify", path)
        yield ("checkpoint", "list", path)
        yield ("checkpoint", "convert", path, f"--out={there['absent']}-out")
    for word in WORDS:
        yield ("report", word)
        yield ("checkpoint", word, there["folder"])
    for word in ("s3://", "s3:///x", "ftp://x/y"):
        yield ("checkpoint", "list", word)
    for word in (*NUMBERS, "0", "1"):
        yield ("parity", there["text"], there["text"], f"--bound={word}")
    for log in _wrong_logs(Path(there["folder"]).parent):
        yield ("parity", log, log)
    for word in NUMBERS:
        yield ("checkpoint", "verify", there["folder"], f"--step={word}")
    yield ("report", RECIPE, "--form", f"--add={there['text']}")
    # Where nothing is written: a device would be replaced by a file, and a link by what it led to.
    for out in ("/dev/null", there["pipe"], there["loop"], f"{there['loop']}/new", there["folder"], "a\0b"):
        yield ("report", RECORD, f"--out={out}")
        yield ("parity", RECORD, RECORD, f"--out={out}")
    for out in ("/dev/null", there["pipe"], there["loop"], f"{there['loop']}/new", there["text"]):
        yield ("report", RECORD, "--crate", f"--out={out}")
        yield ("run", RECIPE, "--vendor", "cpu", "--engine", "host", "--scale", "smoke", f"--out={out}")
    yield ("compare", there["text"], there["text"], "--points=a,b")
    yield ("parity", RECORD, RECORD, "--series=loss")


def _wrong_logs(folder: Path) -> Iterator[str]:
    """Write logs of training in `folder` in which no loss can be read, and yield their paths."""
    for number, text in enumerate(
        (
            "epoch 1 accuracy 0.5\n",
            "step,accuracy\n1,0.5\n",
            "step,loss\n1,3,0\n",
            "step loss none\n",
            '{"step": 1}\n',
            '{"log_history": {}}\n',
            '{"format": "twinrun-trace/1"}\n',
        )
    ):
        path = folder / f"wrong-{number}.log"
        path.write_text(text, encoding="utf-8")
        yield str(path)


def _other_lines(there: dict[str, str]) -> Iterator[tuple[str, ...]]:
    for word in WORDS[:8]:
        yield ("data", word)
        yield ("data", "c4", f"--recipe={word}")
        yield ("data", "c4", f"--engine={word}")
        yield ("cluster", word)
        yield ("jobs", f"--cluster={word}")
        yield (word,)
    for word in (*NUMBERS, "0"):
        yield ("data", "c4", f"--files={word}")
        yield ("cluster", "up", f"--nodes={word}")
        yield ("jobs", f"--cancel={word}")
    for command in ("run", "build", "compare", "report", "doctor", "lock", "data", "sign", "recipes"):
        yield (command, "one", "two", "three")
        yield (command, "--nope")
        yield (command, "-x")


def _foreign_lines(there: dict[str, str]) -> Iterator[tuple[str, ...]]:
    """Yield what users of other programs, and of other spellings, would write."""
    for option in ("nodes", "devices-per-node", "network", "goal", "tokens", "days", "price", "measured"):
        for word in ("many", "-1", "0x10", "9" * 5000, "nan", "0", "1,many", "--", "[]", "inf", "1e999", "½"):
            yield ("predict", "mpt-7b", "--gpu", "h200", f"--{option}={word}")
    for word in ("MI300X", "H100", "mi300", "nope", "", ",", "h200,,h200"):
        yield ("predict", "mpt-7b", f"--gpu={word}")
    for word in ("amd", "AMD", "nvidia", "HIP", "gpu", "intel"):
        yield ("run", RECIPE, "--vendor", word, "--dry")
        yield ("build", "--vendor", word, "--dry")
    for option in ("Vendor", "vendr", "n-gpus", "batch-size", "lr", "gpu", "model", "config", "dry-run"):
        yield ("run", RECIPE, f"--{option}", "1")
    for key in ("lr", "batch_size", "LR", "bs", "gpus", "dtype", "Steps", "max_steps"):
        yield ("run", RECIPE, "--dry", "--engine", "host", f"--set={key}=1")
        yield ("predict", "mpt-7b", "--gpu", "h200", f"--set={key}=1")
    for option, words in (
        ("engine", ("Docker", "VENV", "conda")),
        ("launcher", ("Torchrun", "accelerate", "mpi")),
        ("scheduler", ("SLURM", "sbatch", "k8s")),
        ("scale", ("Smoke", "full")),
        ("stack", ("Cpu", "rocm")),
    ):
        for word in words:
            yield ("run", RECIPE, "--dry", f"--{option}", word)
    for name in ("empty", "folder", "text", "absent"):
        yield ("bisect", RECIPE, f"--good={there[name]}", "--bad=cpu", "--dry")
        yield ("sign", there[name], "--key", there["absent"])
