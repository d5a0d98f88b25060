"""Executor: a library as a callable."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

from tvmcap.base.errors import InputError, TvmcapError
from tvmcap.base.manifest import Manifest, read_manifest
from tvmcap.base.signature import unflatten
from tvmcap.runtime.binding import Plan, Shape, flatten_call, flatten_outputs, is_plain
from tvmcap.runtime.bound import Ready
from tvmcap.runtime.buckets import Buckets
from tvmcap.runtime.checker import Checker, check_overlap, failure
from tvmcap.runtime.counts import Counts, count
from tvmcap.runtime.graphs import LIMIT_BYTES
from tvmcap.runtime.loader import Library
from tvmcap.runtime.machine import check_machine
from tvmcap.runtime.seen import find, remember
from tvmcap.runtime.threads import Contexts, Threads
from tvmcap.runtime.torch_tensors import TorchTensors, telling
from tvmcap.runtime.trace import Interrupted, Trace, Watch
from tvmcap.runtime.vendor import provide


class Executor:
    """A loaded library: torch tensors, NumPy arrays or DLPack objects in, the same kind out.

    Arguments are passed without a copy where they are contiguous and aligned to 16 bytes, else
    copied (``copies`` counts them). Results are new tensors, or written to ``out=``. Several
    threads may call at once, each with intermediates and, on a CPU, a thread pool of its own.

    Parameters
    ----------
    path : the library; its weights file, where it has one, lies beside it.
    device : index of the GPU, for a library built for one.
    manifest : what the file says, where that was read and checked before; it may name another
        entry.
    ready : make the calling thread's memory now, and not at its first call.

    Raises
    ------
    DamagedLibraryError, IncompatibleLibraryError
        Before anything of the file is loaded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        device: int = 0,
        manifest: Manifest | None = None,
        ready: bool = True,
    ) -> None:
        self.path = Path(path)
        self.manifest = manifest or read_manifest(self.path)
        self.signature = self.manifest.signature
        check_machine(self.manifest, device)
        provide(self.manifest.needs, self.path)
        self._library = Library(self.path, self.manifest, device)
        self._checker = Checker(self.signature, self._library.device)
        self._plain = is_plain(self.signature)
        self._count = len(self.signature.arg_names)
        self._single = self.signature.out_tree["kind"] == "leaf"
        tell = telling(self.signature)
        self._telling = tell[0]
        self._may_be_quick = self._plain and self._single and len(tell) == 1
        self._quick = self._may_be_quick
        self._contexts = Contexts(self._library, self.manifest)
        self._threads = Threads(self._contexts)
        if ready:
            self._threads.enter()
        self._buckets: Buckets | None = None

    @property
    def copies(self) -> int:
        """Inputs copied so far because they were not contiguous or not aligned."""
        return self._checker.copies.count

    @property
    def counts(self) -> Counts:
        """What the calls of the calling thread took beside kernels."""
        return count(self._threads.here, self.copies)

    @property
    def arena_bytes(self) -> int:
        """Bytes that all threads hold for intermediates."""
        return self._contexts.arena_bytes

    def use_graphs(self, *, buckets: Sequence[int] = (), limit_bytes: int = LIMIT_BYTES) -> None:
        """Record calls as CUDA graphs, in every thread; see ``Compiled.use_graphs``."""
        found = Buckets(self.signature, buckets) if buckets else None
        self._contexts.use_graphs(limit_bytes)
        self._buckets = found
        self._quick = self._may_be_quick and found is None

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Run the function on tensors of its signature; ``out`` receives the result where given.

        Raises InputError for arguments that do not fit the signature.
        """
        return self.call(args, out, kwargs)

    def call(self, args: Sequence[Any], out: Any, kwargs: dict[str, Any]) -> Any:
        """Run the function, as ``__call__`` does."""
        context = self._threads.here
        if out is not None and not kwargs and self._quick:
            seen = find(context, args, out, self._telling)
            if seen is not None:
                try:
                    context.run(seen.plan, args, (out,), seen.places)
                except Exception as e:
                    self._explain(seen.plan, e)
                return out
        framework, values, addresses, plan = self._bind(args, kwargs)
        if out is None:
            results, targets = self._checker.outputs(framework, plan)
            places = None
            if context.graphs is not None:
                places = (*addresses, *[target.data_ptr() for target in targets])
        else:
            results = [out] if self._single else flatten_outputs(self.signature, out)
            targets, ends = framework.check_out(results, plan)
            places = (*addresses, *ends)
            check_overlap(places, plan)
            if self._quick and values is args and not plan.zero:
                remember(context, args, out, self._telling, plan, places)
        if self._buckets is None:
            self._run(context, plan, values, targets, places)
        else:
            self._run_in_bucket(context, framework, plan, values, targets, places)
        return results[0] if self._single else unflatten(self.signature.out_tree, results)

    def _run(
        self,
        context: Any,
        plan: Plan,
        values: Sequence[Any],
        targets: Sequence[Any],
        places: tuple[int, ...] | None,
    ) -> None:
        """Run on tensors that were checked; without the addresses of all, no replay."""
        if plan.zero:
            if plan.skip:
                return
            values, targets = self._checker.compact(values), self._checker.compact(targets)
            places = None
        try:
            context.run(plan, values, targets, places)
        except Exception as e:
            self._explain(plan, e)

    def _run_in_bucket(
        self,
        context: Any,
        framework: Any,
        plan: Plan,
        values: Sequence[Any],
        targets: Sequence[Any],
        places: tuple[int, ...] | None,
    ) -> None:
        """Run at the size of a bucket and copy the rows; other sizes run and are not recorded."""
        buckets = self._buckets
        size = buckets.find(plan) if buckets and isinstance(framework, TorchTensors) else None
        if buckets is None or size is None:
            recorded = buckets is not None and buckets.holds(plan)
            self._run(context, plan, values, targets, places if recorded else None)
            return

        def run(
            inputs: Sequence[Any], shapes: tuple[Shape, ...], outputs: Sequence[Any] | None
        ) -> list[Any]:
            padded = self._checker.plan(framework, shapes)
            made = list(outputs or self._checker.outputs(framework, padded)[1])
            self._run(context, padded, inputs, made, tuple(x.data_ptr() for x in (*inputs, *made)))
            return made

        values = [value.detach() for value in values]
        context.follow()  # copies to and from the slots of a bucket come before and after the run
        for target, rows in zip(
            targets, buckets.call(size, plan, values, context.slots, run), strict=True
        ):
            target.copy_(rows)

    def check(self) -> None:
        """Raise LibraryError where no call is possible any more."""
        self._contexts.check()

    def _explain(self, plan: Plan, error: Exception) -> NoReturn:
        """Raise what a failure of a call means; another thread may have closed the library."""
        if isinstance(error, Interrupted):
            raise error.error
        self.check()
        if isinstance(error, TvmcapError):
            raise error
        raise failure(self.path, self.device, plan, error) from error

    def bind(self, name: str, tensor: Any) -> None:
        """Keep a tensor for the runs of this thread; see ``Compiled.bind``."""
        self._threads.here.bound.bind(name, tensor)

    def run(self) -> None:
        """Run the function on what this thread has bound; see ``Compiled.run``."""
        context = self._threads.here
        ready = context.bound.ready or self._prepare(context)
        self._run(context, *ready)

    def output(self, position: int = 0) -> Any:
        """Return an output of this thread's last run; see ``Compiled.output``."""
        results = self._threads.here.bound.results
        if results is None:
            self.check()
            raise InputError("output: expected a run before; call run() first")
        try:
            return results[position]
        except (IndexError, TypeError) as e:
            last = len(results) - 1
            raise InputError(f"output: expected a number from 0 to {last}, got {position!r}") from e

    def _prepare(self, context: Any) -> Ready:
        """Check what is bound and return what runs it as long as nothing is bound anew."""
        self.check()
        bound = context.bound
        leaves, copied = bound.leaves(), self._checker.copies.here
        framework, values, addresses, plan = self._checker.check(leaves)
        if self._checker.copies.here != copied:
            raise InputError(
                "run: expected contiguous tensors aligned to 16 bytes, got one that has to be "
                "copied; a tensor is used where it lies, so bind a compact copy"
            )
        results = self._checker.kept(bound, framework, plan)
        targets, ends = framework.check_out(results, plan)
        places = (*addresses, *ends)
        check_overlap(places, plan)
        recorded = self._buckets is None or self._buckets.holds(plan)
        bound.results, bound.ready = results, (plan, values, targets, places if recorded else None)
        ready: Ready = bound.ready
        return ready

    def close(self) -> None:
        """Free the memory of every thread; a call after that raises LibraryError."""
        self._contexts.close(f"{self.path}: this library was closed; load it again")
        self._library.close()
        self._checker.plans.clear()

    def _bind(
        self, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, Sequence[Any], list[int], Plan]:
        """Return the framework of a call, tensors to pass, their addresses, what shapes imply."""
        if kwargs or not self._plain or len(args) != self._count:
            args = flatten_call(self.signature, args, kwargs)
        return self._checker.check(args)

    def trace(self, *args: Any, **kwargs: Any) -> Trace:
        """Run one call and return the kernels it launched and the peak of intermediates' memory."""
        self.check()
        context = self._threads.here
        framework, values, _, plan = self._bind(args, kwargs)
        targets = self._checker.outputs(framework, plan)[1]
        if plan.skip:
            return Trace((), 0)
        if plan.zero:
            values, targets = self._checker.compact(values), self._checker.compact(targets)
        try:
            return context.trace(values, targets)
        except Exception as e:
            self._explain(plan, e)

    @property
    def device(self) -> Any:
        """The ``tvm_ffi.Device`` that the library runs on."""
        return self._library.device

    def sizes(self, *args: Any, **kwargs: Any) -> Mapping[str, int]:
        """Return the symbolic sizes of a call, without running it."""
        return self._bind(args, kwargs)[-1].dims

    def watched(self, before: Watch, after: Watch) -> AbstractContextManager[None]:
        """Call ``before`` and ``after`` with the name of each kernel that this thread launches.

        A call ends where one of them raises, with what it raised.
        """
        self.check()
        return self._threads.here.watched(before, after)

    def kernel_launches(self, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Run one call and return the names of the kernels it launched, in order."""
        return self.trace(*args, **kwargs).kernels

    def peak_bytes(self, *args: Any, **kwargs: Any) -> int:
        """Run one call and return the bytes of its outputs and of intermediates alive at once."""
        *_, plan = self._bind(args, kwargs)
        return self.trace(*args, **kwargs).intermediate_bytes + sum(plan.output_bytes)
