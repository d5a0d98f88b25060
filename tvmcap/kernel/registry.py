"""Registry: the templates of the user, which are asked before those of the project."""

from __future__ import annotations

import sys
from pathlib import Path

from tvmcap.base.errors import ConfigError
from tvmcap.kernel.template import Template, source_hash
from tvmcap.schedules import TEMPLATES

_registered: dict[str, Template] = {}


def register_template(template: Template) -> None:
    """Let builds and tuning of this process ask ``template`` before the templates that ship.

    Of several the one registered last comes first; one of the same name is replaced. The compile
    cache tells builds with it from builds without it by its source.

    Raises
    ------
    ConfigError: it is no ``Template``, its name is that of one that ships, or it lies in a script
        or notebook. The processes that compile candidates import its module, which they do without
        torch.
    """
    if not isinstance(template, Template):
        raise ConfigError(
            f"expected a tvmcap.kernel.template.Template, got {type(template).__name__}"
        )
    if template.name in {shipped.name for shipped in TEMPLATES}:
        raise ConfigError(f"a template named {template.name!r} ships with tvmcap: choose another")
    if template.lower.__module__ == "__main__":
        raise ConfigError(
            f"the template {template.name!r} is in a script or notebook, which the processes that "
            "compile candidates cannot import: move it to a module that does not import torch"
        )
    _registered.pop(template.name, None)
    _registered[template.name] = template


def registered() -> tuple[Template, ...]:
    """Return the templates of the user, the last one first."""
    return tuple(reversed(_registered.values()))


def identity() -> list[list[str]]:
    """Return name and source hash of each, in order."""
    return [[template.name, source_hash(template)] for template in registered()]


def folders() -> list[str]:
    """Return the folders from which their modules can be imported, beside those of ``sys.path``."""
    found: dict[str, None] = {}
    for name in (template.lower.__module__ for template in registered()):
        file = Path(sys.modules[name].__file__ or "").resolve()
        found[str(file.parents[name.count(".") + (file.stem == "__init__")])] = None
    return list(found)
