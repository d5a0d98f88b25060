"""The rungs of the Hopper GEMM: what each setting of the knobs gives, beside cuBLASLt.

    python benchmarks/gemm_ladder.py --json OUT [--shapes 2048x1024x4096,...] [--settings FILE]
        [--layout nk] [--workers N] [--budget SECONDS] [--time-s 0.02] [--dry-run]

FILE holds ``[{"rung": NAME, "knobs": {FIELD: VALUE or [VALUES]}, "min_m": 1, "max_m": 64}, ...]``;
fields left out have their defaults, and a list is every value in turn. Each (K, N, knobs) is
compiled once with symbolic rows, all before anything is timed. A kernel that hangs or faults costs
its own time alone.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gemm_common as gemm
from common import meta
from gemm_common import Setting, Shape
from gemm_report import ladder_json, rung_table, shape_line

from tvmcap.kernel import process

HERE = Path(__file__).resolve().parent
BUILD_TIMEOUT_S, OPEN_TIMEOUT_S, RUN_TIMEOUT_S = 120.0, 180.0, 10.0
BUILDS_A_WORKER, HANGS_A_RUNG, TOLD = 100, 3, 2
Row = dict[str, Any]


class Ladder:
    """One run: the kernels that were built, what was measured, and why others were not."""

    def __init__(self, options: argparse.Namespace, settings: list[Setting]) -> None:
        self.options, self.settings = options, settings
        self.start = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix="gemm-ladder-"))
        self.built: dict[tuple[int, int, Any], dict[str, Any]] = {}
        self.unfit = 0
        self.candidates: list[Row] = []
        self.shapes: dict[Shape, Row] = {}
        self.hangs: Counter[str] = Counter()
        self.told: Counter[tuple[str, str]] = Counter()
        self.built_s = 0.0

    @functools.cached_property
    def meta(self) -> Row:
        """The machine and the software of this run."""
        return meta(("schedules",), dtype="bfloat16", layout=self.options.layout)

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return float(self.options.budget - (time.monotonic() - self.start))

    def worker(self, command: tuple[str, ...]) -> process.Worker:
        """Return a child process, which starts when it is first called."""
        environment = process.environment(gemm.target())
        paths = [str(HERE.parent), str(HERE), environment["PYTHONPATH"]]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), "TVM_NUM_THREADS": "1"}
        return process.Worker(command, environment, self.folder)

    # Building

    def wanted(self, shape: Shape) -> list[Setting]:
        """List the settings for the rows of a shape that fit its problem."""
        from tvmcap.schedules import hopper_gemm

        func = gemm.block(shape.k, shape.n, self.options.layout)
        problem = hopper_gemm.match(func, gemm.target())
        if problem is None:
            print(f"{shape}: the template does not match", flush=True)
            return []
        ranged = [s for s in self.settings if s.min_m <= shape.m <= s.max_m]
        return [s for s in ranged if hopper_gemm.fits(problem, s.knobs)]

    def build(self, plan: dict[Shape, list[Setting]]) -> None:
        """Compile each (K, N, knobs) once, rungs and problems in turns, until 60% of the budget."""
        import tvm

        from tvmcap.schedules import hopper_gemm

        by_problem: dict[tuple[int, int], dict[Any, None]] = defaultdict(dict)
        for shape, settings in plan.items():
            by_problem[shape.k, shape.n] |= dict.fromkeys(s.knobs for s in settings)
        funcs = {kn: tvm.ir.save_json(gemm.block(*kn, self.options.layout)) for kn in by_problem}
        queue = [(*kn, knobs) for kn, group in by_problem.items() for knobs in group]
        position = {item: i for group in by_problem.values() for i, item in enumerate(group)}
        queue.sort(key=lambda item: position[item[2]])
        total, deadline = len(queue), time.monotonic() + 0.6 * self.left()

        def work(worker: process.Worker, item: tuple[int, int, Any]) -> None:
            if time.monotonic() > deadline:
                return
            k, n, knobs = item
            path = str(self.folder / f"{k}x{n}-{len(self.built)}-{time.monotonic_ns()}.so")
            request = {
                "op": "build",
                "target": gemm.target_json(),
                "func": funcs[k, n],
                "template": "tvmcap.schedules.hopper_gemm:TEMPLATE",
                "knobs": hopper_gemm.TEMPLATE.knobs_to_json(knobs),
                "path": path,
            }
            reply = {**worker.call(request, BUILD_TIMEOUT_S), "path": path}
            self.built[k, n, knobs] = reply
            if "error" in reply:
                self.tell("build", f"{k}x{n} {gemm.changed(knobs)}", reply["error"])
            if worker.served >= BUILDS_A_WORKER:
                worker.stop()

        builder = process.command("cuda", builds=True)
        workers = [self.worker(builder) for _ in range(self.options.workers)]
        start = time.monotonic()
        try:
            with ThreadPoolExecutor(len(workers)) as pool:
                process.share_out(pool, workers, queue, work)
        finally:
            for worker in workers:
                worker.stop()
        self.built_s = time.monotonic() - start
        failed = sum("error" in reply for reply in self.built.values())
        print(
            f"built {len(self.built)} of {total} kernels in {self.built_s:.1f} s on "
            f"{len(workers)} processes, {failed} failed; {self.unfit} settings did not fit",
            flush=True,
        )

    # Running

    def run(self, plan: dict[Shape, list[Setting]]) -> None:
        """Time every setting of every shape; shapes share what is left of the budget."""
        runner = self.worker((sys.executable, str(HERE / "gemm_runner.py")))
        try:
            for i, (shape, settings) in enumerate(plan.items()):
                if self.left() < 5:
                    print(f"{shape}: no time left", flush=True)
                    continue
                share = self.left() / (len(plan) - i)
                self.run_shape(runner, shape, settings, time.monotonic() + share)
                self.write()
        finally:
            runner.stop()

    def open(self, runner: process.Worker, shape: Shape) -> bool:
        """Make the inputs of a shape in the runner."""
        request = {"op": "open", **shape._asdict(), "layout": self.options.layout}
        reply = runner.call({**request, "seed": self.options.seed}, OPEN_TIMEOUT_S)
        if "error" in reply:
            print(f"{shape}: {_short(reply)}", flush=True)
            runner.stop()
            return False
        if reply["refused"]:
            print(f"{shape}: baselines refused: {reply['refused']}", flush=True)
        self.shapes.setdefault(shape, {"us": defaultdict(list)})["errors"] = reply["errors"]
        return True

    def sample_baselines(self, runner: process.Worker, shape: Shape) -> None:
        """Take samples of the baselines."""
        reply = runner.call({"op": "baselines", "seconds": 0.03}, OPEN_TIMEOUT_S)
        for name, us in reply.get("us", {}).items():
            self.shapes[shape]["us"][name].append(us)

    def run_shape(
        self, runner: process.Worker, shape: Shape, settings: list[Setting], deadline: float
    ) -> None:
        """Time the settings of one shape between samples of the baselines."""
        if not self.open(runner, shape):
            return
        self.sample_baselines(runner, shape)
        waiting = [s for s in settings if (shape.k, shape.n, s.knobs) in self.built]
        for i, setting in enumerate(waiting):
            if time.monotonic() > deadline:
                print(f"{shape}: {len(waiting) - i} settings left out for time", flush=True)
                break
            if i == len(waiting) // 2:
                self.sample_baselines(runner, shape)
            row = self.candidate(runner, shape, setting)
            self.candidates.append(row)
            if row.get("restart"):
                runner.stop()
                if not self.open(runner, shape):
                    return
        self.sample_baselines(runner, shape)
        print(shape_line(shape, self.shapes[shape], self.of(shape)), flush=True)

    def candidate(self, runner: process.Worker, shape: Shape, setting: Setting) -> Row:
        """Check and time one setting."""
        row: Row = {"shape": shape, "rung": setting.rung, "knobs": setting.knobs}
        built = self.built[shape.k, shape.n, setting.knobs]
        if "error" in built:
            return {**row, "cause": built["error"]["cause"], "message": built["error"]["message"]}
        if self.hangs[setting.rung] >= HANGS_A_RUNG:
            return {**row, "cause": "left out", "message": "others of the rung hang"}
        request = {"op": "time", "path": built["path"], "seconds": self.options.time_s}
        reply = runner.call(request, RUN_TIMEOUT_S)
        if "error" not in reply:
            return {**row, "us": reply["us"], "error": reply["error_size"]}
        error = reply["error"]
        hang = "timeout" in error["cause"]
        self.hangs[setting.rung] += hang
        cause = "hang" if hang else error["cause"]
        self.tell(setting.rung, f"{shape} {gemm.changed(setting.knobs)}", {**error, "cause": cause})
        restart = error.get("fatal", True)
        return {**row, "cause": cause, "message": error["message"], "restart": restart}

    def tell(self, group: str, what: str, error: dict[str, Any]) -> None:
        """Print the first failures of a group and cause; all are in the file."""
        self.told[group, error["cause"]] += 1
        if self.told[group, error["cause"]] <= TOLD:
            print(f"{group} {what}: {_short({'error': error})}", flush=True)

    def of(self, shape: Shape) -> list[Row]:
        """List the timed candidates of a shape, fastest first."""
        good = [c for c in self.candidates if c["shape"] == shape and "us" in c]
        return sorted(good, key=lambda c: statistics.median(c["us"]))

    def write(self) -> None:
        """Write what there is."""
        if self.options.json is None:
            return
        data = {
            "meta": self.meta,
            **ladder_json(self.shapes, self.candidates),
            "built": {
                "kernels": len(self.built),
                "seconds": round(self.built_s, 1),
                "workers": self.options.workers,
                "unfit": self.unfit,
            },
        }
        self.options.json.write_text(json.dumps(data, indent=1) + "\n")


def _short(reply: dict[str, Any]) -> str:
    lines = [x for x in reply["error"]["message"].splitlines() if x.strip()]
    return f"{reply['error']['cause']}: {' | '.join(lines[:1] + lines[-2:])[:400]}"


def parse(arguments: Iterable[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shapes", help="MxKxN,...; default: the suite")
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--layout", choices=("nk", "kn"), default="nk")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds in all")
    parser.add_argument("--time-s", type=float, default=0.02, help="seconds of timing a setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dry-run", action="store_true", help="compile, run nothing")
    return parser.parse_args(list(arguments) if arguments is not None else None)


def main() -> None:
    """Build, run, print, write."""
    from tvmcap.schedules.hopper_gemm import Knobs

    options = parse()
    settings, refused = gemm.read_settings(options.settings, Knobs)
    for text in refused:
        print(f"no such setting: {text}", flush=True)
    ladder = Ladder(options, settings)
    shapes = gemm.parse_shapes(options.shapes)
    plan = {shape: ladder.wanted(shape) for shape in shapes}
    ladder.unfit = len(shapes) * len(settings) - sum(map(len, plan.values()))
    try:
        ladder.build(plan)
        if not options.dry_run:
            ladder.run(plan)
            print(rung_table(ladder.shapes, ladder.candidates), flush=True)
        ladder.write()
    finally:
        shutil.rmtree(ladder.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
