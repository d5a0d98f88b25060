"""Cross-compilation: a cubin on a machine without a GPU, in a process of its own.

What lets TVM's CUDA side library load here (``base.driver``) stays in a child process, so that it
can never spoil a later start of CUDA.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvmcap.base import codegen, driver, ir_text
from tvmcap.base.errors import BuildError


@dataclass(frozen=True)
class Apart:
    """A planned module that a child process compiles when written; stands in for a VMExecutable."""

    mod: Any
    target: dict[str, Any]

    def export_library(self, path: str, options: Sequence[str] = ()) -> None:
        """Compile and link to ``path``; raises BuildError with the child's last words.

        ``options`` go to the compiler that links.
        """
        import json

        import tvm

        codegen.require_nvcc()
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder, "module.json")
            source.write_text(tvm.ir.save_json(self.mod))
            module = [sys.executable, "-m", "tvmcap.library.cross"]
            command = [*module, str(source), json.dumps(self.target), path, *options]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            last = lines[-1] if lines else f"exit code {done.returncode}"
            arch = self.target["arch"]
            raise BuildError(f"cross-compiling for {arch} failed: {last}\n{done.stderr[-4000:]}")


def main(source: str, target: str, path: str, *options: str) -> None:
    """Compile the module of ``source`` (TVM's JSON) for ``target`` (JSON) into ``path``."""
    driver.preload()

    from tvmcap.library.lower import compile_module

    mod = ir_text.parse(Path(source).read_text())
    executable = compile_module(mod, codegen.make_target(target))
    executable.export_library(path, options=list(options))


if __name__ == "__main__":
    main(*sys.argv[1:])
