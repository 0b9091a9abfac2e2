"""One rank as a process: its job in, its pulse and lines while it works, its result out.

Whatever works in a rank knows of this frame `beat`, `report`, `stop_wanted` and the launcher's numbers, and
of no file of a job. Imports without torch.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import platform
import signal
import socket
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from pydantic import BaseModel

from twinrun.foundation.errors import InputError, MachineError, RunInterruptedError, TwinrunError
from twinrun.foundation.files import write_atomically
from twinrun.foundation.manifest import load_json
from twinrun.foundation.processes import end_with_parent
from twinrun.foundation.redaction import cleaned
from twinrun.protocol.allocation import LOADED, Binding, RankReport
from twinrun.protocol.job import OUT_OF_MEMORY, REFUSED, STOPPED, STOPPED_FILE, Job, Result, Stop, forget
from twinrun.protocol.signals import FIRST_SECONDS, PULSE, RankState, interval
from twinrun.train import node
from twinrun.train.loaded import loaded_files

AnyJob = TypeVar("AnyJob", bound=Job)

# Says that ranks have begun an attempt, and may have written lines.
STARTED_FILE = "started"
# Failed allocations that PyTorch reports as plain RuntimeErrors: host memory, driver, cuBLAS.
MEMORY_MESSAGES = ("can't allocate memory", "error: out of memory", "STATUS_ALLOC_FAILED")
# An operation may take so many times its median, and at least as long as file systems are known to stall.
FACTOR, FLOOR_SECONDS = 10.0, 120.0
REMEMBERED = 50
# A file system that hangs must not keep a rank that is done.
PATIENCE_SECONDS = 1.0
_STDERR = 2


def run(work: Callable[[AnyJob], Result], kind: type[AnyJob]) -> NoReturn:
    """Do `work` with the job named on the command line; the first rank writes its result.

    Exits with OUT_OF_MEMORY when memory ran out, so that the host can try what needs less, with STOPPED
    where the ranks were told to end and have saved, or can go on later, and with 1 after any other failure,
    told on stderr.
    """
    # Ranks whose launcher was killed must not train on: who resumes the run would train beside them.
    end_with_parent(signal.SIGKILL)
    # Frameworks that are imported handle SIGTERM by unwinding, which waits for collectives that never end.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        job = load_json(job_argument(), kind)
        # First of all: file systems and drivers, which the next lines ask, may hang.
        _watch(job)
        elastic = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
        # torchrun learns from the file that `record` writes which rank failed first.
        elastic.record(_work)(work, job)
        status = 0
    except StoppedError as stopped:
        if number() == 0:
            write_atomically(Path(job.out) / STOPPED_FILE, Stop(step=stopped.step).model_dump_json() + "\n")
        status = STOPPED
    except Exception as error:
        sys.stderr.write(f"{error}\n" if isinstance(error, TwinrunError) else traceback.format_exc())
        status = STOPPED if isinstance(error, RunInterruptedError) else 1
        status = REFUSED if isinstance(error, MachineError) else status
        _leave(OUT_OF_MEMORY if is_out_of_memory(error) else status)
    for pulse in _pulses:
        pulse.end()
    if status == 0:
        end()
    _leave(status)


def _work(work: Callable[[AnyJob], Result], job: AnyJob) -> None:
    if number() == 0:
        # A scheduler may have started the ranks before, and ended them.
        start_over(job)
    binding = None
    if job.accelerator:
        address_of = importlib.import_module("twinrun.train.device").pci_address
        local, size = variable("LOCAL_RANK", 0), variable("LOCAL_WORLD_SIZE", 1)
        binding = node.bind(local, size, address_of=address_of)
    introduce(job, binding=binding)
    result = work(job)
    if variable("LOCAL_RANK", 0) == 0:
        write_atomically(Path(job.out) / LOADED / f"{number()}.json", loaded_files().model_dump_json() + "\n")
    if number() == 0:
        write_result(job, result)


def end() -> NoReturn:
    """End a rank whose work is done: run the exit handlers, and take no process group down.

    `destroy_process_group` holds the interpreter's lock while it waits for a thread of Gloo, and that thread
    may need the lock to free tensors. An interpreter that ends aborts on the thread: pytorch issue 190489.
    """
    atexit._run_exitfuncs()
    _leave(0)


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Exit handlers of the collectives would wait for the other ranks.
    os._exit(status)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether `error` means that a smaller microbatch might work."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and any(one in str(error) for one in MEMORY_MESSAGES))


# What the launcher says of this rank.
def variable(name: str, default: int) -> int:
    """Return what the launcher says of this rank, for example `LOCAL_RANK`."""
    return int(os.environ.get(name, default))


def number() -> int:
    """Return the number of this rank, before it has joined the others too."""
    return variable("RANK", 0)


def demand_world_size(job: Job) -> None:
    """Raise InputError unless the launcher started as many ranks as the job has."""
    if (started := variable("WORLD_SIZE", 1)) != job.world_size:
        raise InputError("wrong number of ranks", place=job.point, found=started, allowed=job.world_size)


# The files between host and ranks.
_jobs: list[Job] = []


def job_argument() -> Path:
    """Return the file of the job that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True, help="JSON file that describes the point")
    file: Path = parser.parse_args().job
    return file


def introduce(job: Job, *, binding: Binding | None = None) -> None:
    """Say which machine, cores and process this rank runs on; the first of a node says what it is."""
    node.choose_interface()
    _jobs[:] = [job]
    found = RankReport(
        rank=number(),
        host=platform.node(),
        node=None if variable("LOCAL_RANK", 0) else node.describe(),
        binding=binding,
        process=os.getpid(),
    )
    _write(Path(job.out) / "ranks" / f"{found.rank}.json", found)


def report(line: BaseModel) -> None:
    """Append a line to the metrics of this rank's job, on the first rank."""
    if number() == 0 and _jobs:
        with Path(_jobs[0].metrics).open("a", encoding="utf-8") as stream:
            stream.write(line.model_dump_json() + "\n")


def write_result(job: Job, result: Result) -> None:
    """Write the result of the job; for the first rank."""
    _write(Path(job.out) / "result.json", result)


def _write(path: Path, content: BaseModel) -> None:
    """Write what becomes part of a record, in whose texts no credential of this node's environment stays."""
    write_atomically(path, json.dumps(cleaned(content.model_dump(mode="json")), indent=1) + "\n")


def start_over(job: Job) -> None:
    """Take away what an earlier start of this attempt has said; for the first rank."""
    (Path(job.out) / STOPPED_FILE).unlink(missing_ok=True)
    started = Path(job.out) / STARTED_FILE
    if started.exists():
        forget(Path(job.metrics), job.point)
    else:
        write_atomically(started, "")


# Being told to end.
_signals: list[int] = []


class StoppedError(Exception):
    """All ranks have saved what they did, and end."""

    def __init__(self, step: int) -> None:
        super().__init__(f"saved after step {step}")
        self.step = step


def listen_for_stop() -> None:
    """Take SIGTERM, which schedulers send before they kill, as a request; for a run that can save."""
    signal.signal(signal.SIGTERM, _note)


def stop_wanted() -> bool:
    """Say whether this rank was told to end."""
    return bool(_signals)


def _note(received: int, _frame: FrameType | None) -> None:
    _signals.append(received)


# The pulse, and the end of a rank without progress.
class Pulse:
    """Says what a rank does, and ends it with the traceback of each thread where it does that for too long.

    The interpreter's own watchdog waits without its lock, so that nothing which holds the lock keeps it. A
    rank that is stopped writes no more, which the host sees.
    """

    def __init__(self, job: Job) -> None:
        self._seconds, self._every = job.watchdog_seconds, interval(job.world_size)
        self._file = Path(job.out) / PULSE / f"{number()}.json"
        self._spent: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        # Now: once a network is gone, names are not resolved any more.
        self._first = _first_address()
        self.state = RankState(rank=number(), host=platform.node(), pid=os.getpid(), operation="starts")
        self._begin(step=0, operation="starts")
        self._over = threading.Event()
        self._writer = threading.Thread(target=self._write_on, daemon=True)
        self._writer.start()

    def beat(self, operation: str, step: int | None) -> None:
        """Say what is done from now on."""
        self._spent[self.state.operation].append(time.monotonic() - self._began)
        self._begin(step=self.state.step if step is None else step, operation=operation)

    def limit(self, operation: str) -> float:
        """Return for how many seconds the rank may do `operation`; what is done first may compile or read."""
        if not (spent := self._spent.get(operation)):
            return FIRST_SECONDS
        return self._seconds or max(FLOOR_SECONDS, FACTOR * statistics.median(spent))

    def end(self) -> None:
        """Say that all is done and well."""
        self.state = self.state.model_copy(update={"end": "done"})
        self._over.set()
        self._writer.join(PATIENCE_SECONDS)
        faulthandler.cancel_dump_traceback_later()

    def _begin(self, *, step: int, operation: str) -> None:
        self._began, limit = time.monotonic(), self.limit(operation)
        known = {"step": step, "operation": operation, "since": time.time(), "limit": limit}
        self.state = self.state.model_copy(update=known)
        faulthandler.dump_traceback_later(limit, exit=True, file=_STDERR)

    def _write_on(self) -> None:
        over = False
        while not over:
            state = self.state
            if time.monotonic() - self._began > state.limit / 2:
                state = state.model_copy(update={"reaches_first": _reaches(self._first)})
            # A full disk is the rank's to tell.
            with contextlib.suppress(MachineError):
                write_atomically(self._file, state.model_dump_json() + "\n")
            over = self.state.end is not None and self.state is state
            self._over.wait(self._every)


_pulses: list[Pulse] = []


def _watch(job: Job) -> None:
    _pulses[:] = [Pulse(job)]


def beat(operation: str, *, step: int | None = None) -> None:
    """Say what is done from now on, and at which step, the one before where it is left out."""
    for pulse in _pulses:
        pulse.beat(operation, step)


def _first_address() -> tuple[str, int] | None:
    """Return where the first rank answers, None where it has no name or nobody knows it."""
    host, port = os.environ.get("MASTER_ADDR"), variable("MASTER_PORT", 0)
    with contextlib.suppress(OSError):
        return (socket.gethostbyname(host), port) if host and port else None
    return None


def _reaches(address: tuple[str, int] | None) -> bool | None:
    """Say whether the machine at `address` answers, if only to refuse."""
    if address is None:
        return None
    try:
        socket.create_connection(address, timeout=PATIENCE_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
