"""The command line: a verb for each thing that Python can do.

Results go to stdout; progress, logs and errors to stderr.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from tvmcap.base.config import FIELDS, parse_option
from tvmcap.base.errors import ConfigError, TvmcapError
from tvmcap.deploy_options import add_verbs

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130

_EPILOG = """\
PROGRAM is FILE.py:NAME or pkg.mod:NAME (a function, an nn.Module, or what makes one without
arguments) or a .pt2 file. Examples:

  tvmcap build model.py:block --input "x:float32[B=16,1024]" --input "w:float32[1024,4096]" \\
         --input "b:float32[4096]" --constants w,b -o block.so
  tvmcap tune model.py:Net --input "x:float32[B=16,1024]" --trials 128
  tvmcap bench block.so --against model.py:block --sizes B=128
  tvmcap run block.so --sizes B=3 --save out.npz

Exit status: 0 pass, 1 failure of a build or a verification, 2 usage."""

_OPTION_HELP = {
    "target": "llvm, cuda, cuda:sm_80 or a JSON object; default: cuda where a GPU is, else llvm",
    "constants": "arguments to freeze at their example values, separated by commas",
    "tune": "cached (use records), none (rules alone) or a number of trials to run first",
    "budget_s": "seconds that tuning may take in all",
    "disable": "passes to leave out, separated by commas",
    "allow_tf32": "on cuda, matmuls of float32 may be multiplied in tf32",
    "vendor_matmul": "leave matmuls to torch's kernels, which the library then needs",
    "quantize": "8-bit products: int8, fp8, int8-weight-only, fp8-weight-only, auto, or a JSON "
    "object of the fields of tvmcap.Quantize",
    "calibration": "what --quantize needs to know of activations: FILE.py:FUNC, which returns "
    "inputs (a tensor or a tuple of arguments each), or FILE.json of saved ranges",
    "verify": "compare the library with a higher-precision reference after building",
    "log_dir": "folder of tuning records",
    "cache_dir": "folder of the compile cache",
    "dump": "folder that receives the IR after each pass",
    "seed": "seed of every random choice",
    "workers": "processes that compile candidates; with --rpc, devices that measure them",
    "rpc": "HOST:PORT of an RPC tracker whose servers measure candidates",
    "key": "what those servers are registered under",
}
_ACCURACY_HELP = "write what quantization cost, layer by layer, to FILE.html, .json or .txt"

#: ``dynamic`` has a form of its own; nothing stands behind the others.
_NO_OPTION = (
    "dynamic",
    "backward",
    "memory_budget",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        _configure_logging(args.verbose or int(args.verb == "tune"))  # tuning tells how far it is
        from tvmcap import verbs

        return int(getattr(verbs, args.verb)(args))
    except ModuleNotFoundError as e:
        if args.debug:
            raise
        sys.stderr.write(
            f"tvmcap {args.verb} needs the Python package {e.name}: pip install {e.name} (a "
            "machine that only runs libraries may have left it out)\n"
        )
        return EXIT_FAILED
    except TvmcapError as e:
        if args.debug:
            raise
        sys.stderr.write(f"tvmcap {args.verb}: {e}\n")
        return EXIT_USAGE if isinstance(e, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_OK
    except Exception as e:
        if args.debug:
            raise
        text = (str(e).strip().splitlines() or [""])[0]
        sys.stderr.write(
            f"tvmcap {args.verb}: {type(e).__name__}: {text}; --debug shows the traceback\n"
        )
        return EXIT_FAILED


def _configure_logging(verbose: int) -> None:
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(console=Console(stderr=True), show_path=False, show_time=False)
    logger = logging.getLogger("tvmcap")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel([logging.WARNING, logging.INFO, logging.DEBUG][min(verbose, 2)])


def make_parser() -> argparse.ArgumentParser:
    """Describe the verbs and their options."""
    parser = argparse.ArgumentParser(
        prog="tvmcap",
        description="PyTorch code in; a tuned, verified, deployable library out.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    from tvmcap.versions import __version__

    parser.add_argument("--version", action="version", version=f"tvmcap {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _building_verbs(verbs)
    _library_verbs(verbs)
    _store_verbs(verbs)
    add_verbs(verbs, _verb)
    return parser


def _verb(verbs: Any, name: str, text: str, *, json: bool = False) -> argparse.ArgumentParser:
    sub: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    sub.add_argument("-v", "--verbose", action="count", default=0, help="say more; -vv says all")
    sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if json:
        sub.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return sub


def _from(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of at least ``least``."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, got {text!r}"
            )
        return int(text)

    return read


def _building_verbs(verbs: Any) -> None:
    build = _verb(verbs, "build", "compile a program into a library", json=True)
    _program(build)
    build.add_argument("-o", "--output", metavar="FILE.so", help="where the library goes")
    build.add_argument("--accuracy", metavar="FILE", help=_ACCURACY_HELP)
    tune = _verb(verbs, "tune", "measure kernels and keep records for later builds", json=True)
    _program(tune)
    tune.add_argument("--trials", type=_from(1), metavar="N", help="candidates to measure in all")
    bisect = _verb(verbs, "bisect", "name the pass and operator that lose accuracy", json=True)
    _program(bisect)
    bench = _verb(verbs, "bench", "kernels, bytes and latency against PyTorch", json=True)
    _program(bench, "PROGRAM or a library")
    bench.add_argument("--against", metavar="PROGRAM", help="PyTorch code of a library")
    bench.add_argument("--sizes", metavar="B=16", help="symbolic sizes, separated by commas")
    bench.add_argument("--no-baselines", action="store_true", help="time the library alone")
    bench.add_argument("--cold", action="store_true", help="rotate inputs past the cache")
    bench.add_argument("--walk", action="store_true", help="from eager to compiled, step by step")


def _library_verbs(verbs: Any) -> None:
    run = _verb(verbs, "run", "call a library", json=True)
    run.add_argument("library", metavar="FILE.so")
    run.add_argument("--inputs", metavar="FILE", help=".npz or .safetensors by argument, or .npy")
    run.add_argument("--sizes", metavar="B=16", help="symbolic sizes of random inputs")
    run.add_argument("--seed", type=_from(0), default=0, help="seed of random inputs")
    run.add_argument("--save", metavar="FILE", help="write outputs to .npz, .npy or .safetensors")
    run.add_argument(
        "--sample", metavar="FILE", help="write inputs and outputs: what serve and package check on"
    )
    verify = _verb(verbs, "verify", "compare with a higher-precision reference", json=True)
    _program(verify, "PROGRAM or a library")
    verify.add_argument("reference", nargs="?", metavar="PROGRAM", help="same as --against")
    verify.add_argument("--against", metavar="PROGRAM", help="PyTorch code of a library")
    verify.add_argument("--level", choices=("quick", "full"), default="quick")
    verify.add_argument("--sizes", metavar="B=16", help="symbolic sizes, separated by commas")
    show = _verb(verbs, "inspect", "what a library was built from, and its kernels", json=True)
    _program(show, "PROGRAM or a library")
    show.add_argument(
        "--show",
        metavar="PART,...",
        help="of manifest, passes, kernels, accuracy, tir, tir:NAME, source, source:NAME",
    )
    show.add_argument("--accuracy", metavar="FILE", help=_ACCURACY_HELP)
    doctor = _verb(verbs, "doctor", "what this machine has and lacks", json=True)
    doctor.add_argument("--log-dir", help=_OPTION_HELP["log_dir"])
    doctor.add_argument("--cache-dir", help=_OPTION_HELP["cache_dir"])


def _store_verbs(verbs: Any) -> None:
    report = _verb(verbs, "report", "what the tuning records hold, and how tuning went", json=True)
    report.add_argument("folder", nargs="?", help="default: the user's and the shipped records")
    report.add_argument(
        "--target", help=_OPTION_HELP["target"] + "; of a FOLDER: what most records are of"
    )
    report.add_argument(
        "-o", "--output", action="append", default=[], metavar="FILE",
        help="write a page with figures (.html) or the figures (.png); may be given twice",
    )  # fmt: skip
    cache = _verb(verbs, "cache", "stores of tuning records, and the compile cache", json=True)
    cache.add_argument(
        "action",
        choices=("status", "merge", "prune", "clear"),
        help="status: what there is; merge: records of FOLDERs into one; prune: drop records that "
        "no longer serve; clear: empty the compile cache",
    )
    cache.add_argument("folders", nargs="*", metavar="FOLDER", help="stores; default: yours")
    cache.add_argument("--into", metavar="FOLDER", help="merge: where to")
    cache.add_argument(
        "--best", type=_from(1), metavar="N",
        help="prune: how many of the fastest candidates to keep of each task and size",
    )  # fmt: skip
    cache.add_argument(
        "--sample", type=_from(0), metavar="N",
        help="prune: how many others to keep, for cost models to learn from",
    )  # fmt: skip
    cache.add_argument("--dry-run", action="store_true", help="prune: say it and do not do it")
    cache.add_argument("--log-dir", help=_OPTION_HELP["log_dir"])
    cache.add_argument("--cache-dir", help=_OPTION_HELP["cache_dir"])


def _program(parser: argparse.ArgumentParser, what: str = "PROGRAM") -> None:
    """Add the program, its inputs, and every field of Config as an option."""
    from tvmcap.program import INPUT_HELP

    parser.add_argument("program", metavar=what.split()[0], help=f"{what}: see tvmcap --help")
    inputs = parser.add_argument_group("example inputs")
    inputs.add_argument("--input", action="append", default=[], metavar="SPEC", help=INPUT_HELP)
    inputs.add_argument("--inputs-from", metavar="FILE.py:FUNC", help="FUNC returns the arguments")
    inputs.add_argument(
        "--dynamic",
        action="append",
        default=[],
        metavar="ARG:AXIS=NAME",
        help="a dynamic dimension",
    )
    options = parser.add_argument_group("options of the build")
    for name, field in FIELDS.items():
        if name in _NO_OPTION:
            continue
        flag, text = "--" + name.replace("_", "-"), _OPTION_HELP[name]
        if str(field.type) == "bool":
            options.add_argument(
                flag, dest=f"config_{name}", action=argparse.BooleanOptionalAction, help=text
            )
        else:
            options.add_argument(flag, dest=f"config_{name}", metavar="X", help=text)


def config_options(args: argparse.Namespace) -> dict[str, Any]:
    """Collect the fields of Config that the command line gives."""
    given = {n: getattr(args, f"config_{n}", None) for n in FIELDS if n not in _NO_OPTION}
    return {
        name: parse_option(name, value) if isinstance(value, str) else value
        for name, value in given.items()
        if value is not None
    }


if __name__ == "__main__":
    sys.exit(main())
