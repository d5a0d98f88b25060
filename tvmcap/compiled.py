"""Compiled: the library as its user holds it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvmcap.base.accuracy import AccuracyReport
from tvmcap.base.errors import LibraryError, missing
from tvmcap.base.manifest import Manifest, rewrite_manifest
from tvmcap.base.ranges import Ranges
from tvmcap.base.score import Score
from tvmcap.base.signature import Signature
from tvmcap.library.export import copy_library
from tvmcap.runtime.counts import Counts
from tvmcap.runtime.graphs import LIMIT_BYTES
from tvmcap.runtime.opening import open_library

if TYPE_CHECKING:
    from tvmcap.base.config import Config
    from tvmcap.capture.export import Captured
    from tvmcap.view.timeline import Profile


logger = logging.getLogger("tvmcap")


@dataclass(repr=False)
class Compiled:
    """A library: callable, exportable, and able to say what it is.

    Attributes
    ----------
    path: the library file; ``manifest`` is what it says of itself.
    executor: runs it; None for a library of another machine, and ``foreign`` says why.
    config, module, passes: what the compiler knew; None or empty after ``load`` or from the compile
        cache.
    capture_again: makes ``captured`` when it is first asked for.
    """

    path: Path
    manifest: Manifest
    executor: Any
    foreign: str = ""
    config: Config | None = None
    capture_again: Callable[[], Captured] | None = None
    module: Any = None
    passes: list[tuple[str, float]] = field(default_factory=list)
    from_cache: bool = False

    def __repr__(self) -> str:
        """One line; ``inspect`` and ``explain`` say more."""
        from tvmcap.view.inspect import one_line

        return one_line(self.path, self.manifest)

    @functools.cached_property
    def captured(self) -> Captured | None:
        """What capture found; None after ``load``."""
        return self.capture_again() if self.capture_again is not None else None

    @property
    def accuracy(self) -> AccuracyReport | None:
        """What quantization cost, layer by layer, as measured at build; None where there is none.

        ``explain`` shows it as a table, ``write_accuracy`` as HTML, JSON or text.
        """
        found = self.manifest.quantization
        if not found:
            return None
        report = AccuracyReport.from_json(found["report"])
        return replace(report, library_after=self._bytes())

    def write_accuracy(self, path: str | os.PathLike[str]) -> Path:
        """Write what quantization cost to one file: ``.html``, ``.json`` or ``.txt``.

        Raises LibraryError for a library that is not quantized or a path that cannot be written,
        ConfigError for another suffix.
        """
        from tvmcap.view import accuracy

        if self.accuracy is None:
            raise LibraryError(
                f"{self.path}: not quantized, so there is no report of what that cost; build with "
                "quantize='int8'"
            )
        return accuracy.write(self.accuracy, path)

    @property
    def ranges(self) -> Ranges | None:
        """What calibration found: ``build(..., calibration=lib.ranges)`` gives this library again.

        None for a library that is not quantized; ``.save(path)`` writes a JSON file.
        """
        found = self.manifest.quantization
        return Ranges.from_json(found["ranges"]) if found else None

    @property
    def signature(self) -> Signature:
        """The calling convention."""
        return self.manifest.signature

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run it on torch tensors, numpy arrays or DLPack objects; the same kind comes back.

        Raises InputError where an argument does not match the signature; LibraryError for a library
        of another machine.
        """
        return (self.executor or self._here()).call(args, out, kwargs)

    def bind(self, name: str, tensor: Any) -> None:
        """Keep a tensor for the runs of this thread, under the name of an argument or an output.

        Names are those of ``lib.signature``: dotted for nested arguments, ``"out0"`` for the first
        output. The tensor is used where it lies, so that what is written to it later counts. An
        output that is not bound gets memory that every run of this thread reuses.
        Raises InputError for another name.
        """
        self._here().bind(name, tensor)

    def run(self) -> None:
        """Run on what this thread has bound; ``output`` returns the results.

        Raises InputError where an input is not bound or does not fit the signature.
        """
        (self.executor or self._here()).run()

    def output(self, position: int = 0) -> Any:
        """Return an output of this thread's last run; the next run writes to the same memory."""
        return self._here().output(position)

    def use_graphs(self, *, buckets: Sequence[int] = (), limit_bytes: int = LIMIT_BYTES) -> None:
        """Record calls as CUDA graphs and replay them, which takes the least host time.

        Parameters
        ----------
        buckets: sizes of the batch to record at; a call is padded to the smallest that holds it,
            and larger ones are not recorded. By default each size is recorded at its second call.
        limit_bytes: of device memory for graphs, a thread; those unused for longest go first.

        Raises
        ------
        LibraryError
            Where calls of this library cannot be recorded: not on a GPU, or another package runs
            part of it.
        ConfigError
            For buckets that do not fit the signature.
        """
        self._here().use_graphs(buckets=buckets, limit_bytes=limit_bytes)

    @property
    def counts(self) -> Counts:
        """What the calls of this thread took beside kernels: copies, memory, graphs."""
        counts: Counts = self._here().counts
        return counts

    def close(self) -> None:
        """Free memory and code; every later call raises LibraryError. Not needed at exit."""
        if self.executor is not None:
            self.executor.close()

    def _here(self) -> Any:
        if self.executor is None:
            raise LibraryError(f"this library cannot run here: {self.foreign}")
        return self.executor

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the library to ``path``.

        One file, and the weights beside it where they pass 512 MB. Raises LibraryError for a path
        that cannot be written.
        """
        target = _file(path)
        copy_library(self.path, target)
        if self.manifest.needs:
            from tvmcap.view.inspect import needs_text

            logger.warning(
                "%s does not run with TVM's runtime alone: it needs %s wherever it is loaded",
                target,
                needs_text(self.manifest.needs),
            )
        return target

    def __reduce__(self) -> Any:
        """Refuse pickling and copying, which cannot carry code and memory of this process."""
        raise LibraryError(
            "a library cannot be pickled or copied, as it holds code and memory of this process: "
            "write it with lib.export(path), and read it with tvmcap.load(path) where it is needed"
        )

    def scoreboard(
        self,
        sizes: Mapping[str, int] | None = None,
        *,
        baselines: bool = True,
        progress: Any = None,
    ) -> Score:
        """Measure kernels, bytes, memory, latency; ``baselines`` adds eager and torch.compile.

        Raises ToolchainError without torch.
        """
        try:
            from tvmcap.scoreboard import score
        except ModuleNotFoundError as e:
            raise missing("a scoreboard", e) from e

        return score(self, sizes, baselines=baselines, progress=progress)

    def profile(self, *args: Any, calls: int = 20, **kwargs: Any) -> Profile:
        """Run on ``args`` and measure every kernel: its time, its bytes, its share of the roofline.

        Of a library with gradients those of the forward and of the backward entry.

        On a CPU by timers around each kernel, on a GPU by CUPTI through torch's profiler.
        ``print(lib.profile(x))`` shows a table; ``.write_trace("trace.json")`` writes a trace for
        Chrome or Perfetto.

        Parameters
        ----------
        calls: how many calls to measure, after three that are not.

        Raises
        ------
        InputError
            Where an argument does not match the signature.
        LibraryError
            On a GPU without torch.
        """
        from tvmcap.profile import profile

        self._here()
        return profile(self, args, kwargs, calls)

    def explain(self) -> str:
        """Say what was captured and frozen, and which record or rule serves each kernel."""
        from tvmcap.view.explain import explain

        return explain(self)

    def inspect(self, *parts: str) -> str:
        """Show the manifest, passes and kernels.

        ``parts`` may name more (see ``tvmcap inspect --help``).
        """
        from tvmcap.view.inspect import inspect

        return inspect(self, *parts)

    def _bytes(self) -> int | None:
        """Bytes of the library's files; None where they are gone."""
        beside = self.manifest.weights
        files = [self.path, *([] if beside is None else [self.path.with_name(beside.file)])]
        try:
            return sum(file.stat().st_size for file in files)
        except OSError:
            return None

    def mark_verified(self, ok: bool) -> None:
        """Record in the library file whether it was within its error budget."""
        self.manifest = replace(self.manifest, verified=ok)
        rewrite_manifest(self.path, self.manifest)


def load(path: str | os.PathLike[str], *, device: int = 0) -> Compiled:
    """Load an exported library; needs TVM's runtime alone, not its compiler and not torch.

    Raises DamagedLibraryError for a truncated or altered file and IncompatibleLibraryError where
    this machine, its GPU or its TVM is not what the library was built for; both before any code of
    the file runs; LibraryError for a path that names no file.
    """
    path = _file(path)
    executor = open_library(path, device=device)
    if executor.manifest.verified is False:
        logger.warning(
            "%s was not verified where it was built; tvmcap.verify(lib, reference=fn) does it here",
            path,
        )
    return Compiled(path, executor.manifest, executor)


def _file(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as a Path; raises LibraryError where no file can have that name."""
    try:
        file = Path(path)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            file.stat()
    except TypeError as e:
        raise LibraryError(
            f"path: expected the name of a library file such as 'block.so', got {path!r}"
        ) from e
    except (OSError, ValueError) as e:
        reason = getattr(e, "strerror", None) or e
        raise LibraryError(f"{path}: expected the name of a file, got an error: {reason}") from e
    return file
