"""The run: sample a pool of rows, train on it a few times, evaluate, checkpoint, repeat.

Everything random follows from (seed, process, pool, epoch), so a run that resumes needs weights,
optimizer state and its place only, and on a CPU goes on bit for bit. Every process samples its own
rows; gradients are summed over processes. Must not know flags or files but checkpoints and curve.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmesh.distill import checkpoints
from specmesh.distill.attention import Backend, forward_rows
from specmesh.distill.checkpoints import Place
from specmesh.distill.evaluation import HeldOut, Score
from specmesh.distill.losses import LossWeights, distillation_loss
from specmesh.distill.processes import Processes
from specmesh.distill.prompts import PromptSource
from specmesh.distill.sampling import Rows, Sampler, Turn
from specmesh.distill.schedule import Budget, learning_rate, loss_weights
from specmesh.distill.settings import Settings
from specmesh.distill.transformer import Transformer
from specmesh.errors import ConfigError

CURVE_FILE = "curve.jsonl"
# What a token counts in the loss, by whose turn it is: answers are what is served.
TURN_WEIGHTS = {Turn.PROMPT: 0.0, Turn.ANSWER: 1.0, Turn.USER: 0.4, Turn.FREE: 1.0}
_MAX_GRADIENT_NORM = 1.0

Report = Callable[[dict[str, Any]], None]


def make_optimizers(model: Transformer, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon (arXiv 2502.16982: steps of AdamW's size) for matrices, AdamW for the rest; or AdamW."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    rate, decay = settings.learning_rate, settings.weight_decay
    adamw: dict[str, Any] = {
        "lr": rate, "betas": (0.9, 0.95), "fused": others[0].device.type == "cuda",
    }  # fmt: skip
    if settings.optimizer == "adamw":
        groups = [
            {"params": matrices, "weight_decay": decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, **adamw)]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, weight_decay=0.0, **adamw)]


class Trainer:
    """One run on one process. `run` trains until the budget is used up.

    began: when, by `time.monotonic`, the run would have begun without an interruption.
    """

    def __init__(
        self,
        settings: Settings,
        student: Transformer,
        sampler: Sampler,
        source: Callable[[torch.Generator], PromptSource],
        held_out: HeldOut,
        processes: Processes,
        backend: Backend,
        report: Report,
    ) -> None:
        self._settings, self._student, self._sampler = settings, student, sampler
        self._source, self._held_out, self._processes = source, held_out, processes
        self._backend, self._report = backend, report
        self._budget = Budget(
            None if settings.minutes is None else settings.minutes * 60, settings.max_steps
        )
        self._optimizers = make_optimizers(student, settings)
        self._turn_weights = torch.tensor(
            [TURN_WEIGHTS[turn] for turn in Turn], device=processes.device
        )
        self.place = Place()
        self._sampling_s = 0.0
        self._scores: dict[str, Score] = {}
        self._scored_step = -1
        self._sums = torch.zeros(3, dtype=torch.float64, device=processes.device)
        self.began = time.monotonic()

    def resume(self, identity: dict[str, Any]) -> None:
        """Go on from the folder's checkpoint. Raises ConfigError."""
        self.place, state = checkpoints.load(self._settings.out, identity, self._processes.device)
        self._student.load_state_dict(state["student"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.began = time.monotonic() - self.place.elapsed_s
        _cut_curve(self._settings.out / CURVE_FILE, self.place.step)

    def run(self, identity: dict[str, Any]) -> dict[str, Score]:
        """Train; return the last scores. Raises ConfigError when the loss is no longer finite."""
        if self.place.step == 0:
            self._evaluate(identity, None)
        while self._progress() < 1:
            self._train_on(self._draw_pool(), identity)
            self.place.pool += 1
            self.place.batch = 0
        return (
            self._scores if self._scored_step == self.place.step else self._evaluate(identity, None)
        )

    # ------------------------------------------------------------ pools

    def _draw_pool(self) -> Rows:
        """Sample this pool's rows: the same ones whenever it is asked for again."""
        settings, began = self._settings, time.monotonic()
        seed = _mixed(settings.seed, self._processes.rank, self.place.pool)
        source = self._source(torch.Generator().manual_seed(seed))
        noise = torch.Generator(self._processes.device).manual_seed(seed)
        first = self._sampler.draw(source.take(self._openings_a_wave), noise)
        pool = Rows.empty(
            (settings.pool_rows, *first.hidden.shape[1:]), first.hidden.dtype, first.hidden.device
        )
        for begin in range(0, settings.pool_rows, settings.sample_rows):
            wave = (
                first
                if begin == 0
                else self._sampler.draw(source.take(self._openings_a_wave), noise)
            )
            for kept, drawn in zip(pool.fields(), wave.fields(), strict=True):
                kept[begin : begin + settings.sample_rows] = drawn
        if self.place.batch == 0:
            self.place.tokens_sampled += pool.tokens.numel() * self._processes.count
        self._wait_for_device()
        self._sampling_s = time.monotonic() - began
        self._tell({
            "event": "sampled", "pool": self.place.pool, "seconds": self._sampling_s,
            "rows": settings.pool_rows * self._processes.count,
            "tokens": pool.tokens.numel() * self._processes.count, **_shares(pool),
        })  # fmt: skip
        return pool

    @property
    def _openings_a_wave(self) -> int:
        return self._settings.sample_rows * (1 + self._settings.length // 256)

    def _train_on(self, rows: Rows, identity: dict[str, Any]) -> None:
        """Train on a pool `reuse` times, or longer where no time is left to sample another."""
        settings = self._settings
        rows_a_step = settings.batch_rows // self._processes.count
        batches = settings.pool_rows // rows_a_step
        while self._progress() < 1:
            epoch, index = divmod(self.place.batch, batches)
            if epoch >= settings.reuse and self._has_time_for_a_pool():
                return
            seed = _mixed(settings.seed, self._processes.rank, self.place.pool, epoch)
            order = torch.randperm(
                settings.pool_rows, generator=torch.Generator().manual_seed(seed)
            )
            chosen = order[index * rows_a_step : (index + 1) * rows_a_step]
            weights = self._step(rows, chosen.to(self._processes.device))
            self.place.batch += 1
            if self.place.step % settings.report_steps == 0:
                self._evaluate(identity, weights)

    def _has_time_for_a_pool(self) -> bool:
        """Whether sampling another pool leaves as much time again to train on it."""
        if self._budget.seconds is None:
            return True
        left = self._budget.seconds - self._elapsed()
        return self._processes.of_first(left) > 2 * self._processes.of_first(self._sampling_s)

    # ------------------------------------------------------------ steps

    def _step(self, rows: Rows, chosen: Tensor) -> LossWeights:
        """One optimizer step on some rows of this process."""
        settings, progress = self._settings, self._progress()
        weights = loss_weights(progress)
        rate = learning_rate(
            settings.learning_rate, progress, self.place.step, settings.warmup_steps
        )
        token_weights = self._turn_weights[rows.turns[chosen].long()]
        total = self._processes.sum(token_weights.sum()).clamp(min=1.0)
        for micro in torch.split(
            torch.arange(len(chosen), device=chosen.device), settings.micro_rows
        ):
            self._accumulate(rows.take(chosen[micro]), token_weights[micro] / total, weights)
        parameters = list(self._student.parameters())
        self._processes.sum_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, _MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.place.step += 1
        self.place.tokens_trained += token_weights.numel() * self._processes.count
        return weights

    def _accumulate(self, rows: Rows, token_weights: Tensor, weights: LossWeights) -> None:
        counted = token_weights.flatten().nonzero()[:, 0]
        hidden = forward_rows(
            self._student,
            rows.tokens,
            rows.starts,
            self._backend,
            is_mixed=self._processes.device.type == "cuda",
        )
        loss, kl, overlap = distillation_loss(
            hidden.flatten(0, 1)[counted],
            rows.hidden.flatten(0, 1)[counted],
            self._student.head,
            token_weights.flatten()[counted],
            weights,
        )
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            shares = token_weights.flatten()[counted]
            one_step = torch.stack(((shares * kl).sum(), (shares * overlap).sum(), shares.sum()))
            self._sums += one_step.double()

    # ------------------------------------------------------------ time, scores, checkpoints

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _progress(self) -> float:
        progress = self._budget.progress(self._elapsed(), self.place.step)
        return progress if self._budget.seconds is None else self._processes.of_first(progress)

    def _wait_for_device(self) -> None:
        if self._processes.device.type == "cuda":
            torch.cuda.synchronize()

    def _evaluate(self, identity: dict[str, Any], weights: LossWeights | None) -> dict[str, Score]:
        """Score, check that the run is sound, report, write the checkpoint."""
        kl, acceptance, share = self._processes.sum(self._sums.clone()).tolist()
        self._sums.zero_()
        self._check_finite(kl)
        scores = self._held_out.scores(self._student, self._backend)
        self.place.elapsed_s = self._elapsed()
        record: dict[str, Any] = {
            "event": "evaluated", **asdict(self.place), "progress": self._progress(),
            "scores": {name: asdict(score) for name, score in scores.items()},
        }  # fmt: skip
        if share:
            record["train"] = {"kl": kl / share, "acceptance": acceptance / share}
        if weights is not None:
            record["loss_weights"] = asdict(weights)
        if self._processes.is_first:
            state = {
                "student": self._student.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
                "head_ids": self._student.head_ids,
            }
            checkpoints.save(self._settings.out, identity, self.place, state)
        self._tell(record)
        self._scores, self._scored_step = scores, self.place.step
        return scores

    def _check_finite(self, loss: float) -> None:
        """Raise ConfigError, before a checkpoint is written, when the run has gone wrong."""
        norm = torch.stack([p.detach().norm() for p in self._student.parameters()]).sum()
        if math.isfinite(loss) and math.isfinite(float(norm)):
            return
        path = self._settings.out / checkpoints.FILE
        raise ConfigError(
            f"the loss is not finite at step {self.place.step}; the last good checkpoint is "
            f"{path}: resume with a lower learning rate",
            field="learning_rate",
        )

    def _tell(self, record: dict[str, Any]) -> None:
        """Report, and append to the curve, from the first process."""
        if not self._processes.is_first:
            return
        record = {"time_s": round(self._elapsed(), 3), **record}
        with (self._settings.out / CURVE_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self._report(record)


def _shares(rows: Rows) -> dict[str, Any]:
    """Whose tokens a pool holds, and how long its conversations are."""
    counts = torch.bincount(rows.turns.flatten().long(), minlength=len(Turn)).tolist()
    total = rows.turns.numel()
    shares = {turn.name.lower(): round(counts[turn] / total, 4) for turn in Turn}
    return {"turns": shares, "conversation_len": round(total / int(rows.starts.sum()), 1)}


def _mixed(*parts: int) -> int:
    """One 63-bit seed of several small numbers (FNV-1a over their 64-bit words)."""
    value = 0xCBF29CE484222325
    for part in parts:
        value = ((value ^ part) * 0x100000001B3 + 0x9E3779B97F4A7C15) & ((1 << 64) - 1)
        value ^= value >> 29
    return value >> 1


def _cut_curve(path: Path, step: int) -> None:
    """Drop what the curve says of steps after the checkpoint."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line).get("step", 0) <= step]
    path.write_text("".join(kept), encoding="utf-8")
