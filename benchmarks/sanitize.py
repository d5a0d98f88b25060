"""compute-sanitizer over the kernels that ship, at odd sizes: nothing out of bounds, no races.

    python benchmarks/sanitize.py [--tools memcheck,racecheck,synccheck] [--settings FILE]
        [--json OUT]

The fastest setting of each task and size in the shipped records, which is what builds take, and
every default of the template is compiled for problems just over a tile, and runs at odd numbers of
rows in a process under each tool; results are checked too.
FILE gives other settings, as for ``gemm_ladder.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import gemm_common as gemm

from tvmcap.kernel import process

TOOLS = ("memcheck", "racecheck", "synccheck")
ROWS = (1, 63, 65, 2049)
#: (K, N) just over a tile's.
PROBLEMS = ((72, 264), (136, 72))
TIMEOUT_S = 300.0
_HERE = Path(__file__).resolve().parent
_WORKER = (sys.executable, "-m", "tvmcap.kernel.worker", "--without-torch", "--cuda")


def settings(path: Path | None) -> list[Any]:
    """List the knobs to try: of FILE, else the template's defaults and the records' fastest."""
    from tvmcap.kernel.records import Record, RecordStore, canonical
    from tvmcap.schedules import hopper_gemm as hopper

    if path is not None:
        found, refused = gemm.read_settings(path, hopper.Knobs)
        for text in refused:
            print(f"no such setting: {text}", flush=True)
        return list(dict.fromkeys(s.knobs for s in found))
    problem = hopper.match(gemm.block(1024, 4096), gemm.target())
    knobs = [knobs for _, knobs in hopper.ranges(problem, gemm.target())]
    best: dict[str, Record] = {}
    for record in RecordStore(gemm.shipped()).records:
        if record.template == hopper.TEMPLATE.name and record.median_us is not None:
            at = canonical([record.workload_hash, record.sizes])
            if at not in best or record.median_us < (best[at].median_us or 0.0):
                best[at] = record
    knobs += [hopper.TEMPLATE.knobs_from_json(record.candidate) for record in best.values()]
    return list(dict.fromkeys(knobs))


class Sanitizer:
    """The compiled kernels, and the processes under the tools."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="sanitize-"))
        self.environment = process.environment(gemm.target())
        paths = [str(_HERE.parent), str(_HERE), self.environment["PYTHONPATH"]]
        self.environment |= {"PYTHONPATH": os.pathsep.join(paths), "TVM_NUM_THREADS": "1"}

    def worker(self, *command: str) -> process.Worker:
        """Return a process that serves requests."""
        return process.Worker(command, self.environment, self.folder)

    def build(self, knobs: Iterable[Any], workers: int) -> list[dict[str, Any]]:
        """Compile every setting that fits for every problem."""
        import tvm

        from tvmcap.schedules import hopper_gemm as hopper

        jobs = []
        for k, n in PROBLEMS:
            func = gemm.block(k, n)
            problem = hopper.match(func, gemm.target())
            for setting in knobs:
                if hopper.fits(problem, setting):
                    text = hopper.TEMPLATE.knobs_to_json(setting)
                    path = str(self.folder / f"{k}x{n}-{len(jobs)}.so")
                    jobs.append({"k": k, "n": n, "knobs": text, "path": path,
                                 "func": tvm.ir.save_json(func)})  # fmt: skip

        def one(chunk: list[dict[str, Any]]) -> None:
            builder = self.worker(*process.command("cuda", builds=True))
            for job in chunk:
                request = {
                    "op": "build",
                    "target": gemm.target_json(),
                    "template": "tvmcap.schedules.hopper_gemm:TEMPLATE",
                    **{name: job[name] for name in ("func", "knobs", "path")},
                }
                job["failed"] = builder.call(request, 120.0).get("error")
            builder.stop()

        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(one, [jobs[i::workers] for i in range(workers)]))
        return jobs

    def references(self) -> None:
        """Compute what every problem gives at every size, outside the tools."""
        import tvm

        from tvmcap.kernel import spaces, tasks

        builder = self.worker(*process.command("cuda", builds=True))
        worker = self.worker(*_WORKER)
        for k, n in PROBLEMS:
            task = tasks.make_task(gemm.block(k, n), gemm.target(), spaces.find)
            for rows in ROWS:
                bound = tvm.ir.save_json(tasks.bind(task, {task.vars[0].name: rows}))
                library = str(self.folder / f"plain-{k}x{n}x{rows}.so")
                build = {"op": "build_plain", "func": bound, "path": library}
                replies = [builder.call({**build, "target": gemm.target_json()}, 120.0)]
                run = {**self.arguments(k, n, rows), "op": "reference", "library": library}
                replies.append(worker.call(run, TIMEOUT_S))
                for reply in replies:
                    if "error" in reply:
                        raise RuntimeError(f"{k}x{n}, {rows} rows: {reply['error']['message']}")
        builder.stop()
        worker.stop()

    def arguments(self, k: int, n: int, rows: int) -> dict[str, Any]:
        """Return the arguments of a problem as requests hold them."""
        shapes = ([rows, k], [n, k], [n], [rows, n])
        return {
            "args": [{"shape": shape, "dtype": "bfloat16"} for shape in shapes],
            "seed": rows,
            "written": [3],
            "device": "cuda",
            "outputs": str(self.folder / f"{k}x{n}x{rows}.npz"),
        }

    def run(self, tool: str, jobs: list[dict[str, Any]]) -> dict[str, Any]:
        """Run every kernel at every size under a tool; return its findings and wrong results."""
        log = self.folder / f"{tool}.log"
        worker = self.worker("compute-sanitizer", "--tool", tool, "--log-file", str(log), *_WORKER)
        failures = [f"{j['k']}x{j['n']} {j['knobs']}: {j['failed']}" for j in jobs if j["failed"]]
        built = [job for job in jobs if not job["failed"]]
        more = {"op": "run", "numbers": [], "time_s": 0, "limit_us": None}
        for job in built:
            for rows in ROWS:
                arguments = self.arguments(job["k"], job["n"], rows)
                reply = worker.call({**arguments, **more, "path": job["path"]}, TIMEOUT_S)
                if "error" in reply:
                    what = f"{job['k']}x{job['n']}, {rows} rows, {job['knobs']}"
                    error = reply["error"]
                    failures.append(f"{what}: {error['cause']}: {error['message'][:300]}")
        worker.end(60.0)
        text = log.read_text(errors="replace") if log.exists() else ""
        lines = [line for line in text.splitlines() if line.strip("= ")]
        clean = any(" 0 errors" in line or " 0 hazards" in line for line in lines)
        return {
            "tool": tool,
            "runs": len(built) * len(ROWS),
            "clean": clean and not failures,
            "failures": failures,
            "log_tail": lines[-30:],
        }


def main() -> None:
    """Build, run under each tool, say what was found; exit status 1 where that is anything."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--settings", type=Path)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
    sanitizer = Sanitizer()
    try:
        jobs = sanitizer.build(settings(options.settings), options.workers)
        sanitizer.references()
        tools = options.tools.split(",")
        with ThreadPoolExecutor(len(tools)) as pool:
            rows = list(pool.map(lambda tool: sanitizer.run(tool, jobs), tools))
    finally:
        shutil.rmtree(sanitizer.folder, ignore_errors=True)
    for row in rows:
        print(json.dumps(row, indent=1), flush=True)
    if options.json is not None:
        from common import write

        write(options.json, rows, folders=("schedules",), kernels=len(jobs))
    sys.exit(0 if all(row["clean"] for row in rows) else 1)


if __name__ == "__main__":
    main()
