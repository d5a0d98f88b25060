"""What each verb of the command line does; every function returns the exit status."""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path
from typing import Any

from tvmcap.base.config import Config, make_config
from tvmcap.base.errors import AccuracyError, ConfigError, InputError, LibraryError
from tvmcap.cli import EXIT_FAILED, EXIT_OK, config_options
from tvmcap.deploy_verbs import package as package
from tvmcap.deploy_verbs import serve as serve
from tvmcap.program import (
    Program,
    call,
    check_sizes,
    dynamic_option,
    load_function,
    load_program,
    parse_sizes,
)
from tvmcap.store_verbs import cache as cache
from tvmcap.store_verbs import report as report
from tvmcap.view.console import show, status, write, write_json

log = logging.getLogger("tvmcap")


def build(args: argparse.Namespace) -> int:
    """Compile, verify, and write the library."""
    from tvmcap.build import build as run
    from tvmcap.view import accuracy

    program, config = _read(args)
    if args.accuracy:
        accuracy.check_path(args.accuracy)
        if config.quantize is None:
            raise ConfigError("--accuracy says what quantization cost: give --quantize, too")
    try:
        # tuning shows its own progress, and a terminal has room for one
        with contextlib.nullcontext() if isinstance(config.tune, int) else status("building"):
            lib = run(program.fn, program.args, program.kwargs, config=config)
    except AccuracyError as e:
        if args.accuracy and e.report is not None:
            with contextlib.suppress(LibraryError):  # what the build failed for has the report, too
                accuracy.write(e.report, args.accuracy)
        raise
    if args.output:
        lib.export(args.output)
    if args.accuracy:
        lib.write_accuracy(args.accuracy)
    if args.json:
        write_json({"output": args.output, **lib.manifest.to_json()})
    else:
        from tvmcap.view.inspect import manifest_text

        write(manifest_text(lib.manifest))
        if lib.accuracy is not None:
            write(accuracy.text(lib.accuracy))
        write(f"written to {args.output}" if args.output else "not written: give -o FILE.so")
    return EXIT_OK


def tune(args: argparse.Namespace) -> int:
    """Tune, and say what that gained."""
    from dataclasses import asdict

    from tvmcap.tune import tune as run

    program, config = _read(args)
    result = run(program.fn, program.args, program.kwargs, trials=args.trials, config=config)
    write_json(asdict(result)) if args.json else write(str(result))
    return EXIT_OK


def bench(args: argparse.Namespace) -> int:
    """Show the scoreboard."""
    from tvmcap import scoreboard
    from tvmcap.view import report as tables

    sizes = parse_sizes(args.sizes)
    if args.walk:
        program, config = _read(args)
        if program.args is not None:
            dims = [d for axes in (config.dynamic or {}).values() for d in axes.values()]
            check_sizes(sizes, [d if isinstance(d, str) else d.name for d in dims])
        with status("building") as say:
            rows = scoreboard.walk(
                program.fn,
                program.args or (),
                scoreboard.default_steps(config),
                kwargs=program.kwargs,
                sizes=sizes,
                progress=say,
            )
        data = [{"name": r.name, "score": r.score.to_json()} for r in rows]
        show(args.json, data, lambda: tables.walk_table(rows))
        return EXIT_OK
    lib, reference = _library(args)
    check_sizes(sizes, _dims(lib))
    if args.program.endswith(".so") and reference is None and not args.no_baselines:
        log.warning(
            "timed alone, as a library holds no PyTorch code: --against PROGRAM, the code that it "
            "was built from, times eager and torch.compile beside it"
        )
    with status("measuring") as say:
        score = scoreboard.score(
            lib, sizes, not args.no_baselines, say, reference=reference, cold=args.cold
        )
    show(args.json, score.to_json(), lambda: tables.score_table(score))
    return EXIT_OK


def verify(args: argparse.Namespace) -> int:
    """Verify; the exit status says whether it passed."""
    from tvmcap.verify.check import verify as run
    from tvmcap.view.report import verify_table

    sizes = parse_sizes(args.sizes)
    if args.program.endswith(".so") and not (args.against or args.reference):
        raise ConfigError(
            f"a library holds no PyTorch code: give --against PROGRAM, the code that {args.program}"
            " was built from"
        )
    lib, reference = _library(args, verify=False)
    check_sizes(sizes, _dims(lib))
    with status("verifying") as say:
        report = run(
            lib,
            reference=reference,
            level=args.level,
            sizes=[sizes] if sizes else None,
            progress=lambda i, n, name: say(f"verifying {i + 1} of {n}: {name}"),
        )
    show(args.json, report.to_json(), lambda: verify_table(report))
    return EXIT_OK if report.ok else EXIT_FAILED


def bisect(args: argparse.Namespace) -> int:
    """Find the pass and the operator that lose accuracy."""
    from tvmcap.bisect import bisect as run

    program, config = _read(args)
    with status("bisecting") as say:
        report = run(program.fn, program.args, program.kwargs, config=config, progress=say)
    write_json(report.to_json()) if args.json else write(str(report))
    return EXIT_OK if report.ok else EXIT_FAILED


def inspect(args: argparse.Namespace) -> int:
    """Describe a library, or the graph breaks of a program."""
    from tvmcap.view.inspect import check_parts

    parts = args.show.split(",") if args.show else ()
    if "breaks" in parts:
        return _breaks(args)
    check_parts(parts, "breaks")
    lib, _ = _library(args, verify=False)
    if args.accuracy:
        lib.write_accuracy(args.accuracy)
    write_json(lib.manifest.to_json()) if args.json else write(lib.inspect(*parts))
    return EXIT_OK


def _breaks(args: argparse.Namespace) -> int:
    """List where torch.compile would split a program, which need not be one that builds."""
    from tvmcap.capture.breaks import explain_capture

    if args.show != "breaks":
        raise ConfigError("--show breaks builds nothing: it stands alone, without other parts")
    if args.program.endswith(".so"):
        raise ConfigError(
            f"a library is one graph; breaks are those of code, not of {args.program}"
        )
    program, _ = _read(args)
    report = explain_capture(program.fn, program.args or (), program.kwargs)
    write_json(report.to_json()) if args.json else write(str(report))
    return EXIT_OK


def run(args: argparse.Namespace) -> int:
    """Call a library on inputs of a file, or on random ones."""
    from tvmcap.compiled import load
    from tvmcap.view import arrays
    from tvmcap.view.report import dict_table

    lib = load(args.library)
    signature, sizes = lib.signature, parse_sizes(args.sizes)
    check_sizes(sizes, _dims(lib))
    if args.inputs:
        leaves = arrays.read(args.inputs, signature)
    else:
        leaves = arrays.draw(signature, sizes or {}, args.seed)
    outputs = arrays.call(lib, leaves)
    if args.save:
        arrays.write(args.save, outputs)
    if args.sample:
        arrays.write_sample(args.sample, signature, leaves, outputs)
    rows = [arrays.describe(name, value) for name, value in outputs.items()]
    show(args.json, rows, lambda: dict_table(f"Outputs of {args.library}", rows))
    return EXIT_OK


def doctor(args: argparse.Namespace) -> int:
    """Check this machine; an error gives exit status 1."""
    from tvmcap.doctor import diagnose
    from tvmcap.view.report import findings_table

    findings = diagnose(args.log_dir, args.cache_dir)
    show(args.json, [f.to_json() for f in findings], lambda: findings_table(findings))
    return EXIT_FAILED if any(f.status == "error" for f in findings) else EXIT_OK


def _read(args: argparse.Namespace, **defaults: Any) -> tuple[Program, Config]:
    """Load the program and the options of a build."""
    options = {**defaults, **config_options(args)}
    calibration = options.get("calibration")
    if calibration is not None and not calibration.endswith(".json"):
        options["calibration"] = call(calibration)
        if options["calibration"] is None:
            raise ConfigError(
                f"--calibration: {calibration} returned None; return a list of inputs"
            )
    config = make_config(**options)
    program = load_program(args.program, args.input, args.inputs_from, args.dynamic, config.seed)
    dynamic = dynamic_option(program, config.dynamic)
    return program, make_config(config, dynamic=dynamic)


def _library(args: argparse.Namespace, **defaults: Any) -> tuple[Any, Any]:
    """Load a library, or build the program; with the PyTorch code to compare with, if given."""
    against = getattr(args, "against", None) or getattr(args, "reference", None)
    seed = make_config(**{**config_options(args), "calibration": None}).seed
    reference = None if against is None else load_function(against, seed)
    if args.program.endswith(".so"):
        return _open(args.program, foreign=args.verb == "inspect"), reference
    from tvmcap.build import build as run

    program, config = _read(args, **defaults)
    with status("building"):
        lib = run(program.fn, program.args, program.kwargs, config=config)
    if getattr(lib, "executor", None) is None and args.verb != "inspect":
        raise InputError(f"tvmcap {args.verb} runs the library, and {lib.foreign}")
    if lib.captured is None and args.verb != "inspect":
        from tvmcap.capture.export import capture

        lib.captured = capture(program.fn, program.args, program.kwargs, config)
    return lib, reference


def _dims(lib: Any) -> list[str]:
    return [dim.name for dim in lib.signature.dims]


def _open(path: str, *, foreign: bool) -> Any:
    """Load a library; with ``foreign`` also one of another machine, which cannot be called."""
    from tvmcap.base.errors import IncompatibleLibraryError
    from tvmcap.base.manifest import read_manifest
    from tvmcap.compiled import Compiled, load

    try:
        return load(path)
    except IncompatibleLibraryError as e:
        if not foreign:
            raise
        return Compiled(Path(path), read_manifest(path), None, str(e))
