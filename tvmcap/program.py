"""Programs named from a shell: ``FILE.py:NAME`` or ``pkg.mod:NAME``, with their example inputs."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tvmcap.base.config import Dim
from tvmcap.base.errors import CaptureError, ConfigError

_SHORT = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "u8": "uint8",
}
_INPUT = re.compile(
    r"(?:(?P<name>\w+)\s*[:=]\s*)?(?P<dtype>\w+)\[(?P<shape>[^\]]*)\](?:@(?P<high>\d+))?"
)
_EXTENT = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)\s*=\s*)?(?P<size>\d+)(?:\.\.(?P<max>\d+))?")
_FREE = re.compile(r"(?P<arg>[\w.]+):(?P<axis>\d+)=(?P<dim>[A-Za-z_]\w*)(?:\.\.(?P<max>\d+))?")
INPUT_HELP = (
    'example input, such as "x:float32[B=16,1024]": B is a dynamic dimension with example 16 '
    "(B=16..4096 bounds it), other extents are fixed; integers are drawn below N in "
    '"ids:int64[B=4,128]@N" (default 2); the name may be left out'
)


@dataclass(frozen=True)
class Program:
    """What to compile: ``args`` is None for a .pt2 file, which brings its own examples."""

    fn: Any
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic: dict[str, dict[int, Dim]] = field(default_factory=dict)


def load_program(
    name: str,
    inputs: Sequence[str] = (),
    inputs_from: str | None = None,
    dynamic: Sequence[str] = (),
    seed: int = 0,
) -> Program:
    """Find the program ``name`` and make its example inputs.

    Parameters
    ----------
    name: ``FILE.py:NAME``, ``pkg.mod:NAME`` or a .pt2 path. NAME is a function, an nn.Module, or a
        class or a function without arguments that makes one.
    inputs: specifications as in ``INPUT_HELP``, drawn with ``seed``.
    inputs_from: ``FILE.py:FUNC`` instead; FUNC returns the tuple of arguments.
    dynamic: ``"ARG:AXIS=NAME"`` or ``"ARG:AXIS=NAME..MAX"`` for dimensions that are not in
        ``inputs``.

    Raises ConfigError for names that do not exist and specifications that cannot be read,
    CaptureError where the file, or what makes the program or its inputs, raises.
    """
    free = _parse_dynamic(dynamic)
    if name.endswith(".pt2"):
        if not Path(name).is_file():
            raise ConfigError(f"{name}: no such file")
        return Program(name, dynamic=free)
    fn = load_function(name, seed)
    if inputs_from is not None:
        made = call(inputs_from)
        args = tuple(made) if isinstance(made, tuple | list) else (made,)
        return Program(fn, args, {}, free)
    return _with_inputs(fn, inputs, free)


def load_function(name: str, seed: int = 0) -> Any:
    """Return the function or module ``name`` alone; ``seed`` draws the weights of a new module."""
    torch: Any = importlib.import_module("torch")
    torch.manual_seed(seed)
    return as_program(find(name))


def call(name: str) -> Any:
    """Return what ``FILE.py:FUNC`` returns or, in a list, yields; CaptureError where it raises."""
    code = find(name)
    found = _run(code, name)
    return _run(lambda: list(found), name) if isinstance(found, Iterator) else found


def find(name: str) -> Any:
    """Import what ``FILE.py:NAME`` or ``pkg.mod:NAME`` names."""
    where, colon, attribute = name.rpartition(":")
    if not colon or not attribute:
        raise ConfigError(f"{name!r}: expected FILE.py:NAME, pkg.mod:NAME or a .pt2 file")
    module = _import(where)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            have = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
            raise ConfigError(
                f"{where} has no {attribute!r}; it has {', '.join(have) or 'nothing'}"
            )
        found = getattr(found, part)
    return found


def _import(where: str) -> ModuleType:
    if not where.endswith(".py"):
        sys.path.insert(0, str(Path.cwd()))
        try:
            found: ModuleType = _run(lambda: importlib.import_module(where), where)
            return found
        except ModuleNotFoundError as e:
            raise ConfigError(f"cannot import {where!r}: {e}; run it from the folder above") from e
        finally:
            sys.path.pop(0)
    path = Path(where)
    if not path.is_file():
        raise ConfigError(f"{where}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        _run(lambda: loader.exec_module(module), where)
    except BaseException:
        if sys.modules.get(path.stem) is module:
            del sys.modules[path.stem]
        raise
    finally:
        sys.path.pop(0)
    return module


def _run(code: Callable[[], Any], where: str) -> Any:
    """Run the user's code; CaptureError says what it raised, a package that is missing apart."""
    try:
        return code()
    except ModuleNotFoundError:
        raise
    except (Exception, SystemExit) as e:
        message = (str(e).splitlines() or [""])[0]
        frames = [f for f in traceback.extract_tb(e.__traceback__) if f.filename != __file__]
        own = [f for f in frames if Path(f.filename).name == Path(where.split(":")[0]).name]
        told = () if isinstance(e, SyntaxError) else (own or frames)[-1:]
        place = "".join(f" ({f.filename}, line {f.lineno})" for f in told)
        raise CaptureError(f"{where} raised {type(e).__name__}: {message}{place}") from e


def as_program(found: Any) -> Any:
    """Return a function or a module in eval mode; calls what makes a module without arguments."""
    torch: Any = importlib.import_module("torch")
    if not isinstance(found, torch.nn.Module) and callable(found) and not _parameters(found):
        made = _run(found, getattr(found, "__name__", str(found)))
        found = made if isinstance(made, torch.nn.Module) else found
    if isinstance(found, torch.nn.Module):
        return found.eval()
    if not callable(found):
        raise ConfigError(f"expected a function or an nn.Module, got {type(found).__name__}")
    return found


def _parameters(fn: Any, *, required: bool = False) -> list[str]:
    """Name the parameters, or those of them that a call must give."""
    target = fn.forward if hasattr(fn, "forward") and not isinstance(fn, type) else fn
    try:
        found = inspect.signature(target).parameters
        return [n for n, p in found.items() if not required or _is_required(p)]
    except (TypeError, ValueError):
        return []


def _is_required(parameter: inspect.Parameter) -> bool:
    collects = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in collects


def _with_inputs(fn: Any, inputs: Sequence[str], free: dict[str, dict[int, Dim]]) -> Program:
    specs = [parse_input(text) for text in inputs]
    names = _parameters(fn)
    drawn: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    symbolic = any(d.name for _, _, extents, _ in specs for d in extents)
    for i, (name, dtype, extents, high) in enumerate(specs):
        name = name or (names[i] if i < len(names) else f"arg{i}")
        if name not in names:
            raise ConfigError(f"--input {inputs[i]!r}: the arguments are {', '.join(names)}")
        for axis, extent in enumerate(extents):
            if extent.name is None:
                continue
            if sizes.setdefault(extent.name, extent.size) != extent.size:
                raise ConfigError(
                    f"--input: {extent.name} is {sizes[extent.name]} and {extent.size}"
                )
            dim = Dim(extent.name, max=extent.max)
            free = {**free, name: {**free.get(name, {}), axis: dim}}
        weight = symbolic and not any(e.name for e in extents)
        drawn[name] = _draw(dtype, [e.size for e in extents], high, weight)
    missing = [n for n in _parameters(fn, required=True) if n not in drawn]
    if missing:
        example = f'--input "{missing[0]}:float32[B=16,1024]"'
        raise ConfigError(
            f"no example input for {', '.join(missing)}: give each one, such as {example}, or "
            "--inputs-from FILE.py:FUNC"
        )
    ordered = [n for n in names if n in drawn]
    if ordered == names[: len(ordered)]:
        return Program(fn, tuple(drawn[n] for n in ordered), {}, free)
    return Program(fn, (), drawn, free)


@dataclass(frozen=True)
class Extent:
    """One extent of an input: its example size, and its name and bound if it is dynamic."""

    size: int
    name: str | None = None
    max: int | None = None


def parse_input(text: str) -> tuple[str | None, str, list[Extent], int]:
    """Read ``NAME:DTYPE[SHAPE]@HIGH`` into name, dtype, extents and the bound of integers."""
    match = _INPUT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--input {text!r}: expected an {INPUT_HELP}")
    dtype = _SHORT.get(match["dtype"], match["dtype"])
    if dtype not in (*_SHORT.values(), "bool"):
        raise ConfigError(f"--input {text!r}: unknown dtype {match['dtype']!r}")
    extents = []
    for part in filter(None, (p.strip() for p in match["shape"].split(","))):
        extent = _EXTENT.fullmatch(part)
        if extent is None:
            raise ConfigError(f"--input {text!r}: extent {part!r} is neither 16 nor B=16")
        most = None if extent["max"] is None else int(extent["max"])
        extents.append(Extent(int(extent["size"]), extent["name"], most))
    return match["name"], dtype, extents, int(match["high"] or 2)


def _parse_dynamic(texts: Sequence[str]) -> dict[str, dict[int, Dim]]:
    free: dict[str, dict[int, Dim]] = {}
    for text in texts:
        match = _FREE.fullmatch(text.strip())
        if match is None:
            raise ConfigError(f"--dynamic {text!r}: expected ARG:AXIS=NAME or ARG:AXIS=NAME..MAX")
        most = None if match["max"] is None else int(match["max"])
        free.setdefault(match["arg"], {})[int(match["axis"])] = Dim(match["dim"], max=most)
    return free


def _draw(dtype: str, shape: list[int], high: int, weight: bool) -> Any:
    """Draw an example; matrices among the weights keep the size of what they multiply."""
    torch: Any = importlib.import_module("torch")
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(shape) < 0.5
    if not kind.is_floating_point:
        return torch.randint(0, high, shape).to(kind)
    scale = shape[-2] ** -0.5 if weight and len(shape) > 1 and shape[-2] else 1.0
    return (torch.randn(shape) * scale).to(kind)


def parse_sizes(text: str | None) -> dict[str, int] | None:
    """Read ``"B=16,T=8"``."""
    if not text:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name.strip().isidentifier() and size.strip().isdigit() for name, _, size in pairs):
        raise ConfigError(f"--sizes {text!r}: expected NAME=SIZE, several separated by commas")
    return {name.strip(): int(size) for name, _, size in pairs}


def check_sizes(sizes: Mapping[str, int] | None, dims: Iterable[str]) -> None:
    """Raise ConfigError for a size of a dimension that is not one of ``dims``."""
    known = sorted(dims)
    for name in sizes or ():
        if name not in known:
            have = ", ".join(known) or "none"
            raise ConfigError(f"--sizes: no dimension {name!r}; there are: {have}")


def dynamic_option(program: Program, given: Mapping[Any, Any] | None) -> dict[Any, Any] | None:
    """Merge the program's dynamic dimensions over those of the configuration."""
    merged = {**(given or {}), **program.dynamic}
    return merged or None
