"""Text of what a library is made of: manifest, passes, kernels, on request IR and source."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tvmcap.base.errors import ConfigError, LibraryError
from tvmcap.base.manifest import Manifest
from tvmcap.base.signature import Signature
from tvmcap.view import accuracy

PARTS = ("manifest", "passes", "kernels", "accuracy", "tir", "source", "json")


def inspect(compiled: Any, *parts: str) -> str:
    """Describe a library; ``parts`` choose what, by default manifest, passes and kernels.

    Parts: ``manifest`` (what it was built from and for), ``passes`` (seconds of each), ``kernels``
    (what schedules each), ``accuracy`` (what quantization cost, layer by layer), ``tir`` (the final
    module; ``tir:NAME`` one kernel of it), ``source`` (device code that the compiler makes of it),
    ``json`` (the whole manifest). ``tir``, ``source`` and ``passes`` need a library that this
    process built.
    """
    show: dict[str, Callable[[Any, str], str]] = {
        "manifest": lambda c, _: manifest_text(c.manifest),
        "passes": _passes,
        "kernels": lambda c, _: kernels_text(c.manifest),
        "accuracy": _accuracy,
        "tir": _tir,
        "source": _source,
        "json": lambda c, _: json.dumps(c.manifest.to_json(), indent=2),
    }
    check_parts(parts)
    sections = []
    for part in parts or ("manifest", "passes", "kernels"):
        name, _, kernel = part.partition(":")
        if name == "passes" and not parts and not compiled.passes:
            continue
        sections.append(show[name](compiled, kernel))
    return "\n\n".join(sections)


def check_parts(parts: Sequence[str], *others: str) -> None:
    """Raise ConfigError for a part that neither ``inspect`` knows nor is one of ``others``."""
    for part in parts:
        if part.partition(":")[0] not in PARTS:
            raise ConfigError(f"unknown part {part!r}; expected {', '.join([*PARTS, *others])}")


def signature_text(signature: Signature) -> str:
    """List inputs, outputs and symbolic dimensions, one a line."""
    lines = []
    for title, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for s in specs:
            lines.append(f"  {title:7}{s.name}: {s.dtype}[{', '.join(map(str, s.shape))}]")
    for d in signature.dims:
        most = ", without bound" if d.max is None else f" to {d.max}"
        lines.append(f"  dim    {d.name}: from {d.min}{most}")
    return "\n".join(lines)


def one_line(path: Any, manifest: Manifest) -> str:
    """Name a library by its file, target, inputs and outputs."""
    signature = manifest.signature
    inputs, outputs = (
        ", ".join(f"{s.name}: {s.dtype}[{', '.join(map(str, s.shape))}]" for s in specs)
        for specs in (signature.inputs, signature.outputs)
    )
    return f"<tvmcap library {path} for {manifest.target.get('kind')}: {inputs} -> {outputs}>"


def manifest_text(manifest: Manifest) -> str:
    """Describe what the library was built from, for and by."""
    target = ", ".join(f"{k} {v}" for k, v in manifest.target.items() if k != "features" and v)
    versions = ", ".join(f"{k} {v}" for k, v in manifest.versions.items() if v)
    failed = (
        "no: not run where it was built, or outside the budget; "
        "tvmcap verify LIBRARY --against PROGRAM tells"
    )
    state = {True: "yes", False: failed, None: "not yet"}
    lines = [
        f"target     {target}",
        f"versions   {versions}",
        f"verified   {state[manifest.verified]}",
        f"kernels    {manifest.kernels_per_call} a call",
        f"frozen     {', '.join(manifest.frozen) or 'nothing'}",
    ]
    if manifest.needs:
        lines.append(f"needs      {needs_text(manifest.needs)}")
    if manifest.weights is not None:
        lines.append(f"weights    {len(manifest.weights.names)} in {manifest.weights.file}")
    if manifest.peak_bytes is not None:
        lines.append(f"peak       {manifest.peak_bytes} bytes planned for intermediates")
    if manifest.build_s is not None:
        lines.append(f"built in   {manifest.build_s:.2f} s")
    if manifest.key:
        lines.append(f"cache key  {manifest.key}")
    return "\n".join([*lines, "signature", signature_text(manifest.signature)])


def needs_text(needs: Sequence[str]) -> str:
    """Say what a library cannot run without, besides TVM's runtime."""
    named = [name.replace("operator:", "custom operator ") for name in needs]
    return ", ".join(sorted(named, key=lambda name: name.startswith("custom")))


def kernels_text(manifest: Manifest) -> str:
    """Say what schedules each kernel, one a line."""
    lines = ["kernels and what schedules them"]
    for task in manifest.coverage:
        by = task.get("served_by", task.get("by", ""))
        note = task.get("reason") or ", ".join(
            f"{size}: {us}" for size, us in dict(task.get("records") or {}).items()
        )
        lines.append(f"  {task['task']}: {by}" + (f" ({note})" if note else ""))
    return "\n".join(lines)


def _passes(compiled: Any, _: str) -> str:
    if not compiled.passes:
        raise LibraryError(
            "the times of the passes are known only where a library was just built; a file and the "
            "compile cache hold none: build it in this process, with an empty cache_dir"
        )
    total = sum(seconds for _, seconds in compiled.passes)
    rows = [f"  {name:14}{1e3 * seconds:9.1f} ms" for name, seconds in compiled.passes]
    return "\n".join(["passes", *rows, f"  {'in all':14}{1e3 * total:9.1f} ms"])


def _accuracy(compiled: Any, _: str) -> str:
    if compiled.accuracy is None:
        raise LibraryError("the library is not quantized; build with quantize='int8'")
    return accuracy.text(compiled.accuracy)


def _module(compiled: Any) -> Any:
    if compiled.module is None:
        raise LibraryError(
            "a library file holds no IR; build it in this process, with another cache_dir if the "
            "compile cache has it, or with dump=FOLDER"
        )
    return compiled.module


def _tir(compiled: Any, kernel: str) -> str:
    module = _module(compiled)
    if not kernel:
        return str(module.script(show_meta=False))
    found = {g.name_hint: f for g, f in module.functions.items()}
    if kernel not in found:
        raise ConfigError(f"inspect: no kernel {kernel!r}; there are {', '.join(sorted(found))}")
    return str(found[kernel].script(show_meta=False))


def _source(compiled: Any, kernel: str) -> str:
    """Compile the kernels again and show the code generator's own text."""
    import tvm
    from tvm import tirx

    from tvmcap.base import codegen
    from tvmcap.kernel import tir_pipeline

    functions = {g.name_hint: f for g, f in _module(compiled).functions.items()}
    kernels = {
        n: f.with_attr("global_symbol", n)
        for n, f in functions.items()
        if isinstance(f, tirx.PrimFunc) and kernel in ("", n)
    }
    if not kernels:
        raise ConfigError(f"inspect: no kernel {kernel!r} with source to show")
    target = codegen.make_target(compiled.config.target if compiled.config else None)
    parts = []
    for pipeline in (tir_pipeline.LOOPS, tir_pipeline.TIRX):
        chosen = {n: f for n, f in kernels.items() if tir_pipeline.name_for(f) == pipeline}
        if chosen:
            built = tvm.compile(tvm.IRModule(chosen), target=target, tir_pipeline=pipeline).mod
            parts += [m.inspect_source() for m in (built, *built.imports)]
    return "\n".join(p for p in parts if p)
