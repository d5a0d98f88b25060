"""Search in a template's space: all settings ranked at once, the first measured, some explored."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.search_strategy import PySearchStrategy

from tvmcap.kernel import gain
from tvmcap.kernel.cost_model import KnobCostModel, RankModel
from tvmcap.kernel.dataset import group_name
from tvmcap.kernel.features import annotated, new_schedule, read_knobs, template_features
from tvmcap.kernel.measure import Candidate, Measurement
from tvmcap.kernel.records import Record, canonical
from tvmcap.kernel.search import Proposal, Session, new_context
from tvmcap.kernel.stores import Stores
from tvmcap.kernel.tasks import Task

_EXPLORE = 0.2
_SHORT_LIST = 4
"""Candidates that what was learnt in a run alone chooses from, for each that is measured, by a
template's estimate; and among which those that are explored are drawn."""


@derived_object
class KnobSearch(PySearchStrategy):  # type: ignore[misc]
    """MetaSchedule's search strategy over knobs: ``choose`` returns the next schedules."""

    def __init__(self, choose: Callable[[], list[Any]], args_info: Any) -> None:
        super().__init__()
        self.choose, self.args_info = choose, args_info

    def _initialize_with_tune_context(self, context: Any) -> None:
        pass

    def pre_tuning(
        self,
        max_trials: int,
        num_trials_per_iter: int,
        design_spaces: Any,
        database: Any,
        cost_model: Any,
    ) -> None:
        """Need nothing: records decide what was measured."""

    def post_tuning(self) -> None:
        """Need nothing."""

    def generate_measure_candidates(self) -> Any:
        """Return the next batch, or None where all was measured."""
        chosen = self.choose()
        return [ms.MeasureCandidate(sch, self.args_info) for sch in chosen] or None

    def notify_runner_results(self, measure_candidates: Any, results: Any) -> None:
        """Need nothing: the cost model and the records learn."""

    def clone(self) -> Any:
        """Return a strategy of the same choice."""
        return KnobSearch(self.choose, self.args_info)


class TemplateSession(Session):
    """Enumerates a space: the defaults first, then as the model ranks, a share at random.

    A pretrained model ranks all that fits. One that knows nothing but this run chooses from what
    the template's estimate puts first. Once the next batch should gain less than the noise of a
    measurement there is nothing more to propose.
    """

    def __init__(
        self,
        task: Task,
        sizes: dict[str, int],
        target: Any,
        stores: Stores,
        seed: int,
        model: RankModel,
    ) -> None:
        super().__init__(task, sizes, target, stores, seed)
        self.template, self.model = task.template, model
        self.problem = task.template.match(self.bound, target)
        defaults = [task.template.default(task.problem, target)]
        points = task.template.space(task.problem, target)
        sized = task.template.default(self.problem, target)
        if sized in points:
            defaults.append(sized)
        self._first = list(dict.fromkeys(defaults))
        self._points = list(dict.fromkeys([*defaults, *points]))
        self._features = template_features(task.template, self.problem, self._points, target)
        self._texts = [task.template.knobs_to_json(k) for k in self._points]
        self._index = {text: i for i, text in enumerate(self._texts)}
        self._prior = _order(task.template, self.problem, self._points, target)
        self._rng = np.random.default_rng(seed)
        self._count = 0
        history = stores.history(task.key, target, self.record_sizes)
        self._spreads = {r.candidate: (r.p10_us, r.median_us, r.p90_us) for r in history}
        self._plain = new_schedule(self.bound)
        self._context = new_context(
            self.bound,
            target,
            self.name,
            seed,
            None,
            KnobSearch(self._choose, ms.arg_info.ArgInfo.from_prim_func(self.bound)),
        )
        group = group_name(task.workload_hash, self.record_sizes)
        self._cost_model = KnobCostModel(
            model, task.template, target, {self.name: (group, self.problem)}
        )

    def _choose(self) -> list[Any]:
        """Return schedules of the next candidates: defaults, then by score, some at random."""
        left = [i for i, text in enumerate(self._texts) if text not in self.done]
        chosen = [i for i in left if i < len(self._first)][: self._count]
        rest = [i for i in left if i not in set(chosen)]
        room = min(self._count - len(chosen), len(rest))
        if room > 0:
            if self._prior is not None and not self.model.pretrained:
                rest = sorted(rest, key=lambda i: self._prior[i])[: _SHORT_LIST * room]
            scores = self._scores()
            order = [rest[i] for i in np.lexsort((self._rng.random(len(rest)), -scores[rest]))]
            informed = self.model.learnt or self._prior is not None
            explore = int(room * _EXPLORE) if informed else room
            chosen += order[: room - explore]
            tail = order[room - explore :]
            tail = tail[: _SHORT_LIST * room] if informed else tail
            chosen += [tail[i] for i in self._rng.permutation(len(tail))[:explore]]
            if self._gains_nothing(scores, chosen):
                self.converged, chosen = True, []
        return [annotated(self._plain, self._texts[i]) for i in chosen]

    def _scores(self) -> Any:
        if self.model.learnt or self._prior is None:
            return self.model.margins(self._features)
        return -np.log(self._prior)

    def _gains_nothing(self, scores: Any, chosen: list[int]) -> bool:
        """Whether the chosen should gain less than measuring can tell."""
        spreads = {
            self._index[text]: (low, mid, high)
            for text, (low, mid, high) in self._spreads.items()
            if text in self._index and low and mid and high
        }
        times = [mid for _, mid, _ in spreads.values()]
        expected = gain.expected_gain(scores[list(spreads)], times, scores[chosen])
        return expected < gain.noise(list(spreads.values()))

    def propose(self, count: int) -> list[Proposal]:
        """Return the next batch from the search strategy."""
        self._count = count
        candidates = self._context.generate_measure_candidates() or []
        return [self._proposal(read_knobs(c.sch) or "", c) for c in candidates]

    def notify(self, proposals: Sequence[Proposal], results: Sequence[Measurement]) -> None:
        """Learn from a measured batch."""
        for p, r in zip(proposals, results, strict=True):
            self._spreads[canonical(p.knobs)] = (r.p10_us, r.median_us, r.p90_us)
        super().notify(proposals, results)

    def repeat(self, records: Sequence[Record]) -> list[Proposal]:
        """Return proposals for recorded knobs."""
        return self.proposals([self.template.knobs_from_json(canonical(r.knobs)) for r in records])

    def proposals(self, points: Sequence[Any]) -> list[Proposal]:
        """Return proposals for knobs that the search did not choose."""
        return [self._proposal(self.template.knobs_to_json(k), None) for k in points]

    def by_estimate(self) -> list[Any]:
        """Return all knobs of the space, those first that the template expects to be fast."""
        if self._prior is None:
            return list(self._points)
        return [self._points[i] for i in np.argsort(self._prior, kind="stable")]

    def _proposal(self, text: str, measured: Any) -> Proposal:
        at = self._index.get(text)
        knobs = self.template.knobs_from_json(text)
        rows = (
            template_features(self.template, self.problem, [knobs], self.target)[0]
            if at is None
            else self._features[at]
        )
        candidate = Candidate(
            f"{self.task.workload_hash} {text}", self.task.func, self.template, text
        )
        features = [round(float(x), 6) for x in rows]
        return Proposal(candidate, measured, knobs=json.loads(text), features=features)

    def _learn(self, measured: list[Any], outcomes: list[Any]) -> None:
        self._context.notify_runner_results(measured, outcomes)
        self._cost_model.update(self._context, measured, outcomes)


def _order(template: Any, problem: Any, points: Sequence[Any], target: Any) -> Any:
    if template.estimate is None:
        return None
    return np.asarray(template.estimate(problem, points, target), dtype=np.float64)
