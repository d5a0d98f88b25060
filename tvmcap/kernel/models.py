"""Cost models as files: trees as XGBoost writes them, with what they were learnt from and for.

A model stands beside the records it was learnt from, ``<template>.model.json``. It says which
features it takes, and is refused where the template's are others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvmcap.base.errors import LibraryError, RecordError
from tvmcap.base.manifest import write_atomically
from tvmcap.kernel import dataset
from tvmcap.kernel.cost_model import OBJECTIVES, RankModel
from tvmcap.kernel.fingerprint import fingerprint, same_target
from tvmcap.kernel.loop_features import LoopNests
from tvmcap.kernel.loop_recall import recall
from tvmcap.kernel.records import Record, canonical, digest
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tasks import Task

log = logging.getLogger("tvmcap")

SUFFIX = ".model.json"
_ATTRIBUTE = "tvmcap"


def train(
    records: Iterable[Record],
    template: Any,
    target: Any,
    seed: int = 0,
    objective: str = OBJECTIVES[0],
    any_source: bool = False,
) -> RankModel:
    """Return a model learnt from records; where they are few, without trees.

    ``template`` is a template, or ``LOOP_NESTS``.
    """
    found = groups(records, template, target, any_source)
    model = RankModel(seed, tuple(template.feature_names), objective)
    model.pretrain(found, dataset.data_hash(found))
    return model


def groups(
    records: Iterable[Record], template: Any, target: Any, any_source: bool = False
) -> list[dataset.Group]:
    """Return what the records of a template, or of loop nests, teach."""
    if isinstance(template, LoopNests):
        return template.groups(records)
    return dataset.of_template(records, template, target, any_source)


def transfer(
    source: Sequence[dataset.Group],
    own: Sequence[dataset.Group],
    names: Sequence[str],
    seed: int = 0,
) -> RankModel:
    """Return a model learnt from another target's groups, and refined on this target's few."""
    model = RankModel(seed, tuple(names))
    model.pretrain(source, dataset.data_hash(source))
    for group in own:
        model.add(group.name, group.rows, group.times_us)
    model.fit()
    return model


def save(model: RankModel, folder: Path, name: str, target: Any) -> Path:
    """Write the trees of a pretrained model as XGBoost's JSON, and return the file.

    Raises
    ------
    RecordError: there are no trees, or the file cannot be written.
    """
    if model.base is None:
        raise RecordError(f"the model of {name!r} has learnt nothing yet: measure candidates first")
    data = json.loads(bytes(model.base.save_raw("json")))
    about = {
        "template": name,
        "features": list(model.features),
        "objective": model.objective,
        "measurements": model.pretrained,
        "data": model.source,
        "target": fingerprint(target),
        "sum": _sum(data),
    }
    data["learner"]["attributes"] = {_ATTRIBUTE: canonical(about)}
    path, text = folder / (name + SUFFIX), json.dumps(data, separators=(",", ":")) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda part: part.write_text(text))
    except (LibraryError, OSError) as e:
        raise RecordError(f"the model is not saved: {e}") from e
    return path


def _sum(data: Any) -> str:
    """Return the digest of all but the attributes."""
    return digest({k: v for k, v in data["learner"].items() if k != "attributes"})


def load(path: Path, template: Any, target: Any, seed: int = 0) -> RankModel:
    """Read a model that ``save`` wrote.

    Raises
    ------
    RecordError: the file is no such model, or it is of another target or takes other features; the
        message names which.
    """
    model, where = _read(path, template, seed)
    if not same_target(where, fingerprint(target)):
        raise RecordError(_foreign(path, where))
    return model


def _foreign(path: Path, where: Mapping[str, Any]) -> str:
    return f"{path} is a model for {dict(where)}, not for this target"


def _read(path: Path, template: Any, seed: int) -> tuple[RankModel, dict[str, Any]]:
    """Return a model and the fingerprint of its target; raises RecordError as ``load``."""
    import xgboost
    from xgboost.core import XGBoostError

    try:
        text = path.read_text("utf-8")
        data = json.loads(text)
        about = json.loads(data["learner"]["attributes"][_ATTRIBUTE])
        if about["sum"] != _sum(data):  # XGBoost aborts the process on what it cannot read
            raise ValueError("its checksum differs")
        features, objective = [str(name) for name in about["features"]], str(about["objective"])
        measurements, source = int(about["measurements"]), str(about["data"])
        where = dict(about["target"])
        booster = xgboost.Booster({"nthread": 1})
        booster.load_model(bytearray(text, "utf-8"))
        width = booster.num_features()
        if objective not in OBJECTIVES or width != len(features):
            raise ValueError(f"an objective {objective!r} on {width} columns")
    except (OSError, ValueError, LookupError, TypeError, RecursionError, XGBoostError) as e:
        first = (str(e).splitlines() or [""])[0][:200]  # XGBoost's has the whole file
        raise RecordError(
            f"{path} is no cost model ({type(e).__name__}: {first}); train it again"
        ) from e
    expected = list(template.feature_names)
    if features != expected:
        raise RecordError(f"{path} takes other features: {_difference(features, expected)}")
    found = RankModel(seed, tuple(features), objective, measurements, source)
    found.base = booster
    return found, where


def files(folder: Path) -> list[Path]:
    """Return the models in a folder."""
    return sorted(folder.glob("*" + SUFFIX))


def _difference(features: list[str], expected: list[str]) -> str:
    missing = [name for name in expected if name not in features]
    unknown = [name for name in features if name not in expected]
    parts = [f"without {', '.join(missing)}"] if missing else []
    parts += [f"with {', '.join(unknown)}"] if unknown else []
    return " and ".join(parts) or "the same ones in another order"


def find(
    stores: Stores, template: Any, target: Any, seed: int = 0
) -> tuple[RankModel, Path] | None:
    """Return the first model beside the records of ``stores`` that serves, and its file."""
    mine = fingerprint(target)
    for model, path, where in _saved(stores, template, seed):
        if same_target(where, mine):
            return model, path
        log.warning("%s; it is not used", _foreign(path, where))
    return None


def _saved(
    stores: Stores, template: Any, seed: int
) -> Iterator[tuple[RankModel, Path, dict[str, Any]]]:
    """Yield each model beside the records of ``stores``, its file and its target's fingerprint."""
    for store in stores.stores:
        path = store.folder / (template.name + SUFFIX)
        if path.is_file():
            try:
                model, where = _read(path, template, seed)
            except RecordError as e:
                log.warning("%s; it is not used", e)
            else:
                yield model, path, where


def ready(
    stores: Stores, template: Any, target: Any, seed: int = 0, found: Iterable[Task] = ()
) -> RankModel:
    """Return the model with which a run of tuning starts.

    The one that was saved, refined on the records that are not beside it. Where this target has
    none, one of another CPU, or of another GPU, refined on all records of this target; without any,
    one learnt from those, which has no trees where they are few. Records of the loop nests
    ``found`` count whatever features they were written with.
    """
    mine, known = fingerprint(target), stores.usable(target)
    saved = [
        (not same_target(where, mine), model, path)
        for model, path, where in _saved(stores, template, seed)
        if where.get("kind") == mine["kind"]
    ]
    if not saved:
        return train(_today(known, template, found), template, target, seed)
    elsewhere, model, path = min(saved, key=lambda each: each[0])  # of likes the first
    taught = set[int]()
    if elsewhere:
        log.info("%s is of another machine; what is measured here refines it", path)
    else:
        taught = {id(r) for s in stores.stores if s.folder == path.parent for r in s.records}
    more = _today([r for r in known if id(r) not in taught], template, found)
    for group in groups(more, template, target):
        model.add(group.name, group.rows, group.times_us)
    model.fit()
    return model


def _today(records: Sequence[Record], template: Any, found: Iterable[Task]) -> Sequence[Record]:
    """Return records with the features of today where they can be had."""
    return recall(records, found) if isinstance(template, LoopNests) else records
