"""The model card of a draft: how it was made, from what, and what it is worth.

Must not know training: it is given settings, place and measurement.
"""

from __future__ import annotations

from pathlib import Path

from specmesh.acceptance.measure import Measurement
from specmesh.acceptance.report import markdown
from specmesh.distill.checkpoints import Place
from specmesh.distill.prompts import TRAINING_FILE
from specmesh.distill.schedule import FINAL_WEIGHTS, TV_BEGINS, TV_IS_FULL
from specmesh.distill.settings import Settings
from specmesh.distill.student import Plan

CARD_FILE = "README.md"


def card(settings: Settings, plan: Plan, place: Place, measurement: Measurement) -> str:
    """The text of README.md."""
    target = settings.target.name
    return "\n\n".join([
        f"# Draft model for {target}",
        f"A {plan.spec.num_layers}-layer {plan.spec.architecture} of the target's width "
        f"({plan.spec.hidden_size}) for speculative decoding with {target}, made by `specmesh "
        f"distill`. Embedding and head are the target's, unchanged.{_head(settings)}",
        "## Recipe",
        _recipe(settings, plan, place),
        "## Data",
        _data(settings, place),
        "## Acceptance",
        "Measured on text of the target that training never saw: its answers to held-out prompts, "
        "and text that it writes where only the user's turn is opened.",
        markdown(measurement).rstrip(),
        "![Survival by candidate](acceptance.svg)",
    ]) + "\n"  # fmt: skip


def _head(settings: Settings) -> str:
    if settings.draft_vocab is None:
        return ""
    return f" The head covers the {settings.draft_vocab} most frequent token ids only."


def _recipe(settings: Settings, plan: Plan, place: Place) -> str:
    if plan.layers is not None:
        start = f"target layers {', '.join(map(str, plan.layers))}"
    else:
        start = f"the smaller model `{plan.source.name}`"
    optimizer = {"muon": "Muon for matrices and AdamW for the rest", "adamw": "AdamW"}
    return (
        f"Initialised from {start}; {optimizer[settings.optimizer]}, learning rate "
        f"{settings.learning_rate:g} after {settings.warmup_steps} steps of warm-up, down to zero "
        f"by a half cosine, weight decay {settings.weight_decay:g}; {place.step} steps of "
        f"{settings.batch_rows} rows x {settings.length} tokens "
        f"({place.tokens_trained / 1e6:.1f} M tokens trained on, "
        f"{place.elapsed_s / 60:.1f} minutes in all). Loss: forward KL up to {TV_BEGINS:.0%} of "
        f"the run, from {TV_IS_FULL:.0%} on {FINAL_WEIGHTS.kl:g} KL + {FINAL_WEIGHTS.tv:g} total "
        f"variation, linear between. Seed {settings.seed}."
    )


def _data(settings: Settings, place: Place) -> str:
    held_out = "is a held-out prompt (compared without case and punctuation)"
    if settings.prompts is None:
        lists = f"made from word lists (`{_shown(TRAINING_FILE)}`)"
        requests = f"{lists} or begun with a few words that the target completed first"
        temperatures = ", 0.7 to 1 for requests"
        apart = f"No made request {held_out}; what the target made of begun ones is not compared."
    else:
        requests, temperatures = f"given in `{settings.prompts.name}`", ""
        apart = f"No given request that was asked {held_out}."
    return (
        f"{place.tokens_sampled / 1e6:.1f} M tokens that the target wrote itself, each trained on "
        f"about {place.tokens_trained / max(1, place.tokens_sampled):.1f} times: answers to "
        f"requests {requests}, and text without a request. Temperature 1 for most answers, 0.6 to "
        f"1 for the others{temperatures}. No other data was used. {apart}"
    )


def _shown(path: Path) -> str:
    return "/".join(path.parts[-3:])
