"""The verbs of the command line that look after tuning records and the compile cache."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from tvmcap.base.config import make_config
from tvmcap.base.errors import ConfigError
from tvmcap.view.console import show, status, write, write_json

_OK = 0


def report(args: argparse.Namespace) -> int:
    """Sum up the records of a store: tables, or with ``-o`` a page or a picture."""
    from tvmcap.base.codegen import make_target
    from tvmcap.kernel.stores import Stores, open_store, open_stores, template_hashes
    from tvmcap.view.records import record_rows, records_view
    from tvmcap.view.tuning import tuning_report, usual_target

    outputs = [Path(name) for name in args.output]
    if outputs:
        from tvmcap.view.page import check_output, write_report

        for path in outputs:
            check_output(path)
    target: Any = make_target(args.target) if args.target or not args.folder else None
    if args.folder:
        store = open_store(Path(args.folder))
        stores = Stores((store,), store)
        target = target or usual_target(stores) or make_target(None)
    else:
        stores = open_stores(make_config(), target)
    if outputs:
        with status("reading the records"):
            made = tuning_report(stores, target)
            for path in outputs:
                write_report(made, path)
    stats = stores.stats(target, template_hashes())
    rows = record_rows(stores, target)
    data = {**stats, "best": rows}
    if args.json and rows:
        data["report"] = (made if outputs else tuning_report(stores, target)).to_json()
    show(args.json, data, lambda: records_view(stores, target, stats, rows))
    if outputs and not args.json:
        write("".join(f"written to {path}\n" for path in outputs))
    return _OK


def cache(args: argparse.Namespace) -> int:
    """Look after stores of records and the compile cache: status, merge, prune, clear."""
    if args.action == "clear" and args.folders:
        raise ConfigError("cache clear empties the compile cache: its folder is --cache-dir")
    if args.action != "prune" and (args.dry_run or args.best or args.sample):
        raise ConfigError(f"--dry-run, --best and --sample are of cache prune, not {args.action}")
    return {"status": _status, "merge": _merge, "prune": _prune, "clear": _clear}[args.action](args)


def _options(args: argparse.Namespace) -> Any:
    given = {"cache_dir": args.cache_dir, "log_dir": args.log_dir}
    return make_config(**{name: value for name, value in given.items() if value})


def _status(args: argparse.Namespace) -> int:
    from tvmcap import cache as libraries
    from tvmcap.kernel import upkeep
    from tvmcap.kernel.stores import known_folders
    from tvmcap.view import report as tables

    config = _options(args)
    folders = [Path(f) for f in args.folders] or known_folders(config)
    stores = [upkeep.status(folder) for folder in folders]
    found, held = libraries.status(config.cache_dir), libraries.contents(config.cache_dir)
    data = {
        "folder": str(found.folder),
        "entries": found.entries,
        "bytes": found.bytes,
        "libraries": held,
        "stores": [store.to_json() for store in stores],
    }

    def table() -> Any:
        parts: list[Any] = [part for store in stores for part in _store_parts(store)]
        size = tables.bytes_text(found.bytes)
        parts.append(Text(f"{found.folder}: {found.entries} libraries, {size}"))
        rows = [{**row, "bytes": tables.bytes_text(row["bytes"])} for row in held]
        return Group(*parts, *([tables.dict_table("", rows)] if rows else []))

    show(args.json, data, table)
    return _OK


def _store_parts(store: Any) -> list[Any]:
    from tvmcap.view.report import bytes_text, dict_table

    line = f"{store.folder}: {store.records} records, {store.bad_lines} bad lines, "
    line += bytes_text(store.bytes)
    if store.models:
        line += f"; cost models: {', '.join(store.models)}"
    rows = [
        {"target": h.target, "template": h.template, "state": h.state, "records": h.records,
         "tasks": h.tasks}
        for h in store.held
    ]  # fmt: skip
    return [Text(line), *([dict_table("", rows)] if rows else [])]


def _merge(args: argparse.Namespace) -> int:
    from tvmcap.kernel import upkeep

    if not args.folders or not args.into:
        raise ConfigError("expected folders to merge and where to: cache merge A B --into C")
    done = upkeep.merge(args.folders, args.into)
    bad = sum(done.bad_lines.values())
    text = f"{done.into}: {done.added} records added, {done.present} were there"
    text += f"; {bad} bad lines stay in their folders" if bad else ""
    write_json(done.to_json()) if args.json else write(text)
    return _OK


def _prune(args: argparse.Namespace) -> int:
    from tvmcap.kernel import upkeep
    from tvmcap.kernel.stores import SHIPPED, known_folders

    config = _options(args)
    known = known_folders(config)
    shipped = SHIPPED.resolve()
    own = [f for f in known if not f.resolve().is_relative_to(shipped)]
    folders = [Path(f) for f in args.folders] or own
    asked = {name: getattr(args, name) for name in ("best", "sample")}
    given = {name: count for name, count in asked.items() if count is not None}
    done = [upkeep.prune(f, dry_run=args.dry_run, others=known, **given) for f in folders]
    if args.json:
        write_json([d.to_json() for d in done])
    else:
        write("\n".join(map(_pruned_text, done)) or "no store of records to prune")
    return _OK


def _pruned_text(done: Any) -> str:
    from tvmcap.view.report import bytes_text

    total = sum(done.dropped.values())
    verb = "would drop" if done.dry_run else "dropped"
    why = f" ({', '.join(f'{n} {reason}' for reason, n in done.dropped.items())})" if total else ""
    before, after = map(bytes_text, done.bytes)
    lines = [f"{done.folder}: {verb} {total} records{why}, {done.kept} kept; {before} to {after}"]
    if done.last_copies:
        where = "are" if done.dry_run else "were"
        lines.append(
            f"  {done.last_copies} of them {where} in no other store known here: the last copies "
            f"{'would be' if done.dry_run else 'are'} gone"
        )
    if done.bad_lines:
        lines.append(f"  {done.bad_lines} lines are no records; they stay")
    return "\n".join(lines)


def _clear(args: argparse.Namespace) -> int:
    from tvmcap import cache as libraries
    from tvmcap.view.report import bytes_text

    done = libraries.clear(_options(args).cache_dir)
    data = {"folder": str(done.folder), "entries": done.entries, "bytes": done.bytes}
    text = f"{done.folder}: removed {done.entries} libraries, {bytes_text(done.bytes)}"
    write_json(data) if args.json else write(text)
    return _OK
