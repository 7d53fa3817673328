"""The worker's half of reusing documents: it moves what was loaded to its places, and computes the rest.

That happens at the end of the step in which a load has come, before vLLM hears of it: the request waits for its load
and does not run yet. A fault of ours ends no engine and no request: vLLM hears of a load that failed, and begins the
request anew. That is right with every model runner, and with steps that are planned ahead; for a request that runs it
would not be (vLLM's issue 49250).

All ranks must do the same, since a forward pass waits for all of them. So they agree on which loads all of them have,
before each pass that all of them are ready for it, and after it that it went well on all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from vllm.distributed import get_tp_group

from semkv_vllm.exchanges import LeftWaitingError, UnknownExchangeError
from semkv_vllm.gate import Layers, RefusedError, Trial, fuse, refusal, trial_of
from semkv_vllm.moving import Moves, Slots, distances, on_device, tolerance
from semkv_vllm.orders import DocumentJob, DocumentStep, WorkerNews
from semkv_vllm.pictures import Prompt, prompt_of, source_of, within
from semkv_vllm.repair import Gap, Pass, Repair
from semkv_vllm.shared import KVShared, ours
from semkv_vllm.spans import Load, Span, staged

log = logging.getLogger("semkv.connectors")

_T = TypeVar("_T")


@dataclass
class _Plan:
    """What is done for some loads, on the device.

    Attributes:
        passes: what is still computed, one pass a step.
        watched: tokens that are computed although they were loaded.
        before: their keys and values in the first layer, as they were moved.
    """

    passes: list[Pass]
    watched: Slots
    before: torch.Tensor


class Placement:
    """See the module. For a worker's thread.

    Attributes:
        refused: why nothing is reused; empty where it may be.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        block: int,
        shared: KVShared,
    ) -> None:
        self.refused = refusal(vllm_config, kv_cache_config) or "the model is not bound"
        self.shared = shared
        self._ranks = int(vllm_config.parallel_config.tensor_parallel_size)
        self._allowed = not refusal(vllm_config, kv_cache_config)
        self._block = block
        self._trusted = True
        self._mismatched = False
        self._coming: dict[str, Load | None] = {}  # by request what is being loaded
        self._here = set[str]()  # of these, what this rank has got
        self._unloaded = set[str]()
        self._turn: list[str] = []  # what is being repaired, in this step and maybe in later ones
        self._plan: _Plan | None = None
        self._layers: Layers | None = None
        self._repair: Repair | None = None
        self._runner: Any = None
        self._device = torch.device("cpu")

    def bind(self, runner: Any, caches: dict[str, torch.Tensor]) -> None:
        """Look at the model, once its KV cache is there.

        Raises:
            LeftWaitingError: other ranks wait for this one.
        """
        if not self._allowed:
            return
        try:
            self.refused = self._looked_at(runner, caches)
        except LeftWaitingError:
            raise
        except Exception as error:  # whatever a model or a release of vLLM does not have
            log.warning("semkv: the check of the model for documents failed", exc_info=True)
            self.refused = f"the check of the model failed ({type(error).__name__}: {error})"

    def _looked_at(self, runner: Any, caches: dict[str, torch.Tensor]) -> str:
        """Why the model is refused. No rank begins to compute before all of them are ready for it."""
        trial: Trial | None = None
        reason = ""
        try:
            trial = self._trial(runner, caches)
        except (RefusedError, UnknownExchangeError) as refused:
            reason = str(refused)
        except Exception as error:
            log.warning("semkv: the model's layers are not as expected", exc_info=True)
            reason = f"its layers are not as expected ({type(error).__name__}: {error})"
        if not self._agree(trial is not None):
            return reason or "another rank refuses"
        assert trial is not None
        if not self._run(trial.passes):
            return "a text could not be computed"
        try:
            trial.refuse(tolerance(runner.vllm_config.model_config.dtype))
        except RefusedError as refused:
            return str(refused)
        if self._device.type != "cpu":
            longest = int(runner.vllm_config.model_config.max_model_len)
            fuse(trial.layers, runner.kv_cache_config.num_blocks, longest)
        return ""

    def _trial(self, runner: Any, caches: dict[str, torch.Tensor]) -> Trial:
        self._layers = Layers(runner, caches)
        self._repair = Repair(
            runner,
            self._block,
            cells=self._layers.cells,
            most=self.shared.settings.document_rows,
        )
        self._runner = runner
        self._device = runner.device
        trial = trial_of(self._layers, self._repair, runner, self._block)
        self._repair.rehearse(trial.passes[0])
        return trial

    @property
    def bound(self) -> bool:
        """Whether a model was found to be right."""
        return not self.refused

    # ------------------------------------------------------------------ what the scheduler hears

    def take_news(self, meta: Any) -> WorkerNews | None:
        """What is new since the last call, with vLLM's own words; None for nothing.

        Also where vLLM's words are all: one rank's words add up those of the others, and vLLM's leave ours out.
        """
        faults = self.shared.counters.pop("errors", 0)
        if meta is None and not faults and not self._mismatched:
            return None
        news = WorkerNews(
            **vars(meta) if meta is not None else {},
            mismatch=self._mismatched,
            faults=faults,
        )
        self._mismatched = False
        return news

    def distrust(self, why: str) -> None:
        """Nothing is reused any more, of what is under way either."""
        self._trusted = False
        self._mismatched = True
        log.error(
            "semkv: %s: no document is reused at another position until this engine is started again",
            why,
        )

    # ------------------------------------------------------------------ a step

    def _nothing_loaded(self, step: Any) -> None:
        """After a fault of `begin`: no load of this step is of use, not even an exact one."""
        self._end_if_others_wait()
        for job in step.load_jobs.values():
            self._coming[job.req_id] = None

    @ours("the documents of a step", instead=_nothing_loaded)
    def begin(self, step: Any) -> None:
        """Note what the scheduler says of a step (``OffloadingConnectorMetadata``)."""
        for job in step.load_jobs.values():
            if isinstance(job, DocumentJob):
                self._coming[job.req_id] = job.load
        if not isinstance(step, DocumentStep):
            return
        coming = {job.req_id for job in step.load_jobs.values()}
        for name in step.unloaded:
            if name in coming:
                self._coming[name] = None
            else:
                self._unloaded.add(name)
        for name in self._coming.keys() & step.dropped:
            self._coming[name] = None

    def _nothing_right(self, results: Any) -> None:
        """After a fault of `finish`: what has come has failed."""
        self._end_if_others_wait()
        here = set(self._here)
        self._plan = None
        self._tell(results, here, here | self._unloaded)

    @ours("the documents of a step", instead=_nothing_right)
    def finish(self, results: Any) -> None:
        """Repair what has come, before vLLM hears that it is there (``KVConnectorTransferResults``).

        It hears of a load when all ranks have it, and that it failed where it could not be repaired.
        """
        self._here |= results.finished_recving & self._coming.keys()
        results.finished_recving -= self._coming.keys()
        self._turn = self._turn or self._on_all_ranks()
        right = self._repair_turn()
        ended = [] if right is None else self._turn
        failed = {name for name in ended if not right or self._coming[name] is None}
        self._tell(results, ended, failed | self._unloaded)

    def _tell(self, results: Any, ended: Iterable[str], failed: set[str]) -> None:
        """Let vLLM hear of loads that have ended, and which of them failed."""
        names = set(ended)
        for name in names:
            self._coming.pop(name, None)
        self._here -= names
        self._turn = [name for name in self._turn if name not in names]
        self._unloaded = set()
        results.finished_recving |= names | failed
        results.failed_recving |= failed

    def _on_all_ranks(self) -> list[str]:
        """What all ranks have got."""
        names = list(self._coming)  # in the same order on all ranks
        here = self._all([name in self._here for name in names]) if names else []
        return [name for name, is_here in zip(names, here, strict=True) if is_here]

    def _repair_turn(self) -> bool | None:
        """Make the KV of some requests what their plans say; whether that went well, None while it goes on."""
        if not self._turn:
            return True
        right = self._reuse() if self._trusted else False
        if right is not None:
            self._plan = None
        if right is False:
            self._wait()
        return right

    def _wait(self) -> None:
        """Until nothing of ours runs on the device: the blocks of what has failed may be others' soon."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()

    def _end_if_others_wait(self) -> None:
        """Called for a fault that is being handled: with several ranks nothing but the engine's end helps."""
        if self._ranks == 1:
            self._wait()
            return
        log.critical(
            "semkv: the engine ends: this rank failed where the %d others wait for it (the error is below)",
            self._ranks - 1,
        )
        raise

    def _reuse(self) -> bool | None:
        """Move what is reused and compute the rest, one pass in each step; whether that went well."""
        loads = [load for name in self._turn if (load := self._coming[name]) is not None]
        if self._plan is None and loads:
            self._plan = self._agreed(lambda: self._moved(loads))
        plan = self._plan
        if plan is None or not self._run(plan.passes[:1]):
            return False
        plan.passes = plan.passes[1:]
        if plan.passes:
            return None
        right = self._agreed(lambda: self._is_right(plan))
        if right is None:
            return False
        if not self._agree(right):
            self.distrust("rotated keys are not what the model computes")
            return False
        return True

    def _agreed(self, make: Callable[[], _T]) -> _T | None:
        """What ``make`` gives, where it has a result on all ranks."""
        made: _T | None = None
        try:
            made = make()
        except Exception:
            self.shared.fault("the documents of a step")
        return made if self._agree(made is not None) else None

    def _agree(self, mine: bool) -> bool:
        """Whether something holds on all ranks."""
        return self._all([mine])[0]

    def _all(self, mine: list[bool]) -> list[bool]:
        """Of each of some things, whether it holds on all ranks."""
        if self._ranks == 1:
            return mine
        held = torch.tensor(mine, dtype=torch.int32)
        torch.distributed.all_reduce(
            held,
            op=torch.distributed.ReduceOp.MIN,
            group=get_tp_group().cpu_group,
        )
        return [bool(value) for value in held.tolist()]

    def _run(self, passes: list[Pass]) -> bool:
        """Run passes for which all ranks are ready; whether that went well on all of them."""
        assert self._repair is not None
        went_well = True
        try:
            self._repair.run(passes)
        except LeftWaitingError:
            raise
        except Exception:
            self.shared.fault("the documents of a step")
            went_well = False
        return self._agree(went_well)

    def _passes(self, loads: Sequence[Load], prompts: Mapping[str, Prompt]) -> list[Pass]:
        assert self._repair is not None
        return self._repair.passes(
            Gap(
                blocks=load.blocks,
                tokens=load.tokens,
                prompt=prompts[load.request],
                begin=gap.begin,
                end=gap.end,
            )
            for load in loads
            for gap in load.gaps()
        )

    def _prompts(self, loads: Sequence[Load]) -> dict[str, Prompt]:
        """By request what the model is told of its tokens."""
        assert self._repair is not None
        model = self._runner.get_model()
        found = {}
        for load in loads:
            own = within(load.pictures, 0, load.end)
            found[load.request] = prompt_of(model, self._repair.axes, load.tokens, own)
        return found

    def _moved(self, loads: Sequence[Load]) -> _Plan:
        """Move what is reused, and make ready to compute the rest."""
        assert self._layers is not None
        assert self._repair is not None
        prompts = self._prompts(loads)
        passes = self._passes(loads, prompts)
        model = self._runner.get_model()
        moves = moves_of(loads, prompts, model, self._block)
        self._layers.move(moves.to(self._device))
        numbers = [slot_numbers(load, load.watched(), self._block) for load in loads]
        watched = Slots.of(on_device(np.concatenate(numbers), self._device), self._block)
        return _Plan(
            passes=passes,
            watched=watched,
            before=self._first_layer(watched),
        )

    def _first_layer(self, tokens: Slots) -> torch.Tensor:
        """Keys and values of the first layer at some tokens."""
        assert self._layers is not None
        keys, values = self._layers.cells[0].read(tokens)
        return torch.stack((keys, values))

    def _is_right(self, plan: _Plan) -> bool:
        """The live check: what was computed again is what was moved."""
        after = self._first_layer(plan.watched)
        off = distances(plan.before, after)
        return float(off.max()) <= tolerance(after.dtype)


# ---------------------------------------------------------------------- which tokens


def slot_numbers(load: Load, spans: Iterable[Span], block: int) -> np.ndarray:
    """vLLM's numbers of the slots of some tokens."""
    places = np.concatenate([np.arange(span.begin, span.end) for span in spans])
    # From a token's place to its slot it is as far as for all tokens of its block.
    shifts = (load.blocks - np.arange(len(load.blocks))) * block
    numbers: np.ndarray = shifts[places // block] + places
    return numbers


def moves_of(
    loads: Sequence[Load],
    prompts: Mapping[str, Prompt],
    model: Any,
    block: int,
) -> Moves:
    """All reused tokens of all requests, in the order of the prompts.

    Raises:
        ValueError: a document's tokens do not all move by one number of positions.
    """
    slots: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    firsts = [0]
    for load in loads:
        prompt = prompts[load.request]
        before: list[Span] = []
        after: list[Span] = []
        for piece in load.pieces:
            count = min(piece.last, load.end) - piece.first
            first = staged(piece, block).begin
            before.append(Span(first, first + count))
            after.append(Span(piece.first, piece.first + count))
            alone = source_of(model, load, piece, prompt)
            source = alone[:, piece.skip : piece.skip + count]
            target = prompt.positions[:, piece.first : piece.first + count]
            shift = target - source
            if (shift != shift[0, 0]).any():
                raise ValueError("a document does not move by one number of positions")
            sources.append(source)
            targets.append(target)
        slots.append(
            np.stack(
                (
                    slot_numbers(load, before, block),
                    slot_numbers(load, after, block),
                )
            )
        )
        firsts.append(firsts[-1] + slots[-1].shape[1])
    return Moves(
        slots=torch.from_numpy(np.concatenate(slots, axis=1)),
        source=torch.from_numpy(np.concatenate(sources, axis=1)),
        target=torch.from_numpy(np.concatenate(targets, axis=1)),
        firsts=torch.tensor(firsts),
    )
