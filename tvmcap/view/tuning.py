"""What the records of a store tell of tuning, put together for a page, a picture or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tvmcap.base.errors import ConfigError, RecordError
from tvmcap.kernel.dataset import group_name
from tvmcap.kernel.fingerprint import fingerprint, same_target, target_of, tvm_version
from tvmcap.kernel.held_out import Judgement, Prediction, judge
from tvmcap.kernel.history import History, histories
from tvmcap.kernel.loop_features import LOOP_NESTS
from tvmcap.kernel.records import canonical
from tvmcap.kernel.stores import Stores, template_hashes
from tvmcap.kernel.upkeep import target_text


@dataclass(frozen=True)
class TuningReport:
    """How tuning went for one target, and what its records teach.

    Attributes
    ----------
    folders: the stores.
    target: text of the target.
    status: records of the stores by status, as ``Stores.stats`` counts them.
    other_targets: records of other targets, which are left out, by target.
    histories: one a task and size.
    judgements: one a template with enough records of today's source.
    notes: what is left out, and why.
    """

    folders: tuple[str, ...]
    target: str
    status: Mapping[str, int]
    other_targets: Mapping[str, int]
    histories: tuple[History, ...]
    judgements: tuple[Judgement, ...]
    notes: tuple[str, ...]

    @cached_property
    def failures(self) -> Counter[str]:
        """Measurements that failed, by cause."""
        found = Counter[str]()
        for history in self.histories:
            found.update(history.failures)
        return found

    @property
    def measurements(self) -> int:
        """Measurements in all."""
        return sum(len(h.steps) for h in self.histories)

    @property
    def seconds(self) -> float | None:
        """Seconds of tuning; None where no record has a date."""
        known = [s.seconds for h in self.histories for s in h.steps if s.seconds is not None]
        return max(known, default=None)

    def predictions(self, history: History) -> list[Prediction]:
        """Return what was predicted for the candidates of a history: one entry or none."""
        template = history.key.template or LOOP_NESTS.name
        name = group_name(history.key.workload_hash, history.sizes)
        now = template_hashes().get(template, history.key.template_hash)
        if history.key.template_hash != now:
            return []
        known = [j for j in self.judgements if j.template == template]
        return [p for j in known for p in j.predictions if p.group == name]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON data."""
        return {
            "folders": list(self.folders),
            "target": self.target,
            "status": dict(self.status),
            "causes": dict(self.failures),
            "other_targets": dict(self.other_targets),
            "measurements": self.measurements,
            "seconds": self.seconds,
            "tasks": [_task_json(h) for h in self.histories],
            "models": [_model_json(j) for j in self.judgements],
            "notes": list(self.notes),
        }


def _task_json(history: History) -> dict[str, Any]:
    return {
        "task": history.key.workload_hash,
        "template": history.key.template,
        "sizes": dict(history.sizes),
        "first_us": history.first_us,
        "best_us": history.best_us,
        "candidate": None if history.best is None else history.best.candidate,
        "failures": dict(history.failures),
        "curve": [[s.trial, s.seconds, s.median_us, s.best_us] for s in history.steps],
    }


def _model_json(judgement: Judgement) -> dict[str, Any]:
    return {
        "template": judgement.template,
        "measurements": judgement.measurements,
        "held_out": judgement.held_out,
        "pairwise": judgement.pairwise,
        "best_of_1": judgement.best_of_1,
        "importance": [list(pair) for pair in judgement.importance],
        "predictions": [
            {
                "group": p.group,
                "measured_us": p.measured_us.tolist(),
                "predicted_us": p.predicted_us.tolist(),
            }
            for p in judgement.predictions
        ],
    }


def usual_target(stores: Stores) -> dict[str, Any] | None:
    """Return the target that most of the records are of; None where there are none."""
    found = Counter(canonical(r.target) for store in stores.stores for r in store.records)
    texts = {canonical(r.target): r.target for store in stores.stores for r in store.records}
    return texts[found.most_common(1)[0][0]] if found else None


def tuning_report(stores: Stores, target: Any) -> TuningReport:
    """Read a report off the records of a target (a Target, or a fingerprint as records hold it).

    Raises
    ------
    RecordError: the stores hold no record of the target by this TVM; it says what they hold.
    """
    records = stores.usable(target)
    hashes = template_hashes()
    status = {k: n for k, n in stores.stats(target, hashes)["status"].items() if n}
    folders = tuple(str(s.folder) for s in stores.stores if s.records or s.bad_lines)
    if not records:
        places = ", ".join(str(s.folder) for s in stores.stores)
        held = ", ".join(f"{n} {name}" for name, n in status.items()) or "nothing"
        raise RecordError(
            f"no record by TVM {tvm_version()} of the target {target_text(fingerprint(target))} in "
            f"{places}, which hold {held}: tvmcap tune writes records, --target names another"
        )
    mine = records[0].target
    others = Counter(
        target_text(r.target)
        for s in stores.stores
        for r in s.records
        if not same_target(r.target, mine)
    )
    notes = _notes(status, others)
    try:
        judgements = judge(records, target_of(mine))
    except ConfigError as e:
        judgements, notes = [], [*notes, f"Nothing can be learnt for this target here: {e}"]
    return TuningReport(
        folders, target_text(mine), status, dict(others), tuple(histories(records)),
        tuple(judgements), tuple(notes),
    )  # fmt: skip


def _notes(status: Mapping[str, int], others: Mapping[str, int]) -> list[str]:
    notes = [f"{n} records of {text} are left out" for text, n in others.items()]
    said = {
        "other_tvm": "records of another TVM are left out",
        "stale_template": "records are of other source of their template: the curves have them, "
        "builds and cost models do not",
        "bad_lines": "lines are no records",
    }
    return notes + [f"{status[name]} {text}" for name, text in said.items() if status.get(name)]
