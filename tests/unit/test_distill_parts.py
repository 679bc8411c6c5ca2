"""Parts of `specmesh distill`: prompts, sampler, losses, schedule, student, files, settings."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specmesh.distill import checkpoints
from specmesh.distill.attention import packed_attention, positions_of
from specmesh.distill.losses import LossWeights, distillation_loss
from specmesh.distill.prompts import (
    HELD_OUT_FILE,
    TRAINING_FILE,
    PromptSource,
    chat_frame,
    read_prompts,
)
from specmesh.distill.run import _read
from specmesh.distill.sampling import Endings, Opening, Rows, Sampler, Turn
from specmesh.distill.schedule import FINAL_WEIGHTS, Budget, learning_rate, loss_weights
from specmesh.distill.settings import check_space
from specmesh.distill.student import evenly_spaced, most_frequent
from specmesh.distill.transformer import Transformer, load_transformer
from specmesh.engine.families import read_spec
from specmesh.errors import ConfigError, InvalidRequest, ModelMismatch
from specmesh.tokenizer import load_tokenizer
from tests.unit.distill_pair import settings, tiny_target, tokenizer_files
from tests.unit.tiny_models import save, tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target with a chat template."""
    return tiny_target(tmp_path_factory.mktemp("target"))


def load(folder: Path) -> Transformer:
    spec = read_spec(folder, load_tokenizer(folder).vocab_size)
    return load_transformer(folder, spec, dtype=torch.float32, device=CPU)


# ---------------------------------------------------------------- prompts


def test_held_out_prompts_are_varied_and_apart() -> None:
    """Enough prompts, no two the same, and none that the training lists' patterns spell out."""
    prompts = read_prompts(HELD_OUT_FILE)
    assert len(prompts) >= 64
    assert len(set(prompts)) == len(prompts)
    lists = json.loads(TRAINING_FILE.read_text())
    assert not set(prompts) & set(lists["patterns"])


def test_training_never_sees_a_held_out_prompt(target: Path) -> None:
    """A request that the lists make is left out once it is held out, however it is written."""
    tokenizer = load_tokenizer(target)
    first = PromptSource(tokenizer, torch.Generator().manual_seed(1))
    made = [first.made() for _ in range(50)]
    held_out = [prompt.upper() + "!" for prompt in made]
    second = PromptSource(tokenizer, torch.Generator().manual_seed(1), held_out=held_out)
    assert not set(made) & {second.made() for _ in range(50)}


def test_given_prompts_take_the_place_of_made_ones(target: Path) -> None:
    """Only the given request is asked; too long or held-out ones alone are an error."""
    tokenizer = load_tokenizer(target)
    source = PromptSource(tokenizer, torch.Generator().manual_seed(1), given=["hello there"])
    asked = {
        tokenizer.decode(opening.token_ids, skip_special=False)
        for opening in source.take(60)
        if opening.turn is Turn.ANSWER
    }
    assert asked == {"<s>user\nhello there</s>\n<s>assistant\n"}
    for given, limit in ((["x" * 300], 256), (["hello"], 256)):
        with pytest.raises(ConfigError, match="prompts"):
            PromptSource(
                tokenizer, torch.Generator(), given=given, held_out=["Hello!"],
                max_opening_len=limit,
            )  # fmt: skip


def test_the_frame_of_a_chat(target: Path) -> None:
    """What stands before and after the user's text, and which id ends the user's turn."""
    tokenizer = load_tokenizer(target)
    frame = chat_frame(tokenizer)
    assert (frame.before, frame.after) == ("<s>user\n", "</s>\n<s>assistant\n")
    assert frame.endings.user_suffix[0] == tokenizer.eos_ids[0]


@pytest.mark.parametrize("line", ["{", '{"text": "x"}', '{"prompt": " "}', ""])
def test_prompt_files_that_cannot_be_used(tmp_path: Path, line: str) -> None:
    """Broken lines are named by file and number; an empty file is refused."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"prompts"):
        read_prompts(path)


# ---------------------------------------------------------------- rows, attention, sampler


def test_positions_restart_with_each_conversation() -> None:
    """A token's position counts from the first token of its own conversation."""
    starts = torch.tensor([[True, False, False, True, False], [True, True, False, False, False]])
    assert positions_of(starts).tolist() == [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]


def test_conversations_do_not_see_each_other(target: Path) -> None:
    """Packed behind another conversation, a text has the states it has alone."""
    model, tokens = load(target), torch.arange(12) % 7
    starts = torch.zeros(1, 12, dtype=torch.bool)
    starts[0, [0, 5]] = True
    packed = model(tokens, positions_of(starts)[0], packed_attention(starts, "torch"))
    alone = starts[:, 5:]
    single = model(tokens[5:], positions_of(alone)[0], packed_attention(alone, "torch"))
    torch.testing.assert_close(packed[5:], single)


def drawn(target: Path, opening: Opening, endings: Endings, length: int = 48) -> tuple[Rows, Any]:
    model = load(target)
    sampler = Sampler(model, endings, num_rows=3, length=length, max_opening_len=40)
    return sampler.draw([opening] * 5, torch.Generator().manual_seed(3)), model


def test_recorded_states_are_those_of_a_full_pass(target: Path) -> None:
    """What the sampler kept of each token equals one pass over the whole row."""
    opening = Opening([256, 1, 2, 3], Turn.ANSWER)
    rows, model = drawn(target, opening, Endings((257,), [257, 10]))
    flat = model(
        rows.tokens.long().flatten(),
        positions_of(rows.starts).flatten(),
        packed_attention(rows.starts, "torch"),
    )
    torch.testing.assert_close(rows.hidden.flatten(0, 1), flat, rtol=1e-4, atol=1e-4)


def test_an_answer_ends_and_the_next_prompt_begins(target: Path) -> None:
    """With an end that comes at once, conversations follow each other, each from its opening."""
    opening = Opening([256, 1, 2, 3], Turn.ANSWER)
    everything = tuple(range(258))
    rows, _ = drawn(target, opening, Endings(everything, [257, 10]), length=12)
    assert rows.starts.nonzero()[:, 1].tolist() == [0, 4, 8] * 3
    assert rows.tokens.view(3, 3, 4).unique(dim=1).squeeze(1).tolist() == [[256, 1, 2, 3]] * 3
    assert rows.turns.tolist() == [[0, 0, 0, 1] * 3] * 3
    assert rows.next_tokens[:, :3].tolist() == [[1, 2, 3]] * 3


def test_a_begun_request_is_ended_and_answered(target: Path) -> None:
    """The user's turn is cut at its limit, the template's suffix follows, then the answer."""
    opening = Opening([256, 65], Turn.USER)
    endings = Endings((), [257, 10, 256, 11], max_user_len=10)
    rows, _ = drawn(target, opening, endings, length=24)
    for tokens, turns in zip(rows.tokens.tolist(), rows.turns.tolist(), strict=True):
        end = tokens.index(257)
        assert end <= 10
        assert tokens[end : end + 4] == [257, 10, 256, 11]
        expected = [0] + [2] * (end - 1) + [0] * 3 + [1] * (24 - end - 3)
        assert turns == expected


def test_sampling_follows_the_targets_law(target: Path) -> None:
    """The first answer token over many rows has the frequencies of the target's softmax."""
    model, count = load(target), 4000
    sampler = Sampler(model, Endings((), [257]), num_rows=count, length=3, max_opening_len=8)
    opening = Opening([256, 5], Turn.ANSWER, answer_temperature=0.8)
    rows = sampler.draw([opening] * count, torch.Generator().manual_seed(1))
    p = (model.logits(rows.hidden[0, 1:2]).double() / 0.8).softmax(-1)[0]
    counts = torch.bincount(rows.next_tokens[:, 1].long(), minlength=len(p)).double()
    chosen = p * count > 5
    chi2 = ((counts - count * p) ** 2 / (count * p))[chosen].sum()
    freedom = int(chosen.sum()) - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5


def test_openings_that_do_not_fit(target: Path) -> None:
    """Fewer openings than rows, or one too long, are refused."""
    opening = Opening([1] * 41, Turn.ANSWER)
    with pytest.raises(ValueError, match="longer than 40"):
        drawn(target, opening, Endings((), [257]))
    sampler = Sampler(load(target), Endings((), [257]), num_rows=3, length=8, max_opening_len=4)
    with pytest.raises(ValueError, match="2 openings"):
        sampler.draw([Opening([1], Turn.FREE)] * 2, torch.Generator())


# ---------------------------------------------------------------- losses and schedule


def test_the_loss_and_its_gradient() -> None:
    """Loss, KL, acceptance and the gradient in hidden states equal autograd over whole logits."""
    generator = torch.Generator().manual_seed(0)
    student, states = (torch.randn(300, 8, generator=generator).double() for _ in range(2))
    head = torch.randn(31, 8, generator=generator).double()
    weights = torch.rand(300, generator=generator).double()
    student.requires_grad_()
    loss, kl, acceptance = distillation_loss(student, states, head, weights, LossWeights(0.3, 3.0))
    loss.backward()
    found, student.grad = student.grad, None
    p, q = (states @ head.T).softmax(-1), (student @ head.T).softmax(-1)
    plain_kl = (p * (p.log() - q.log())).sum(-1)
    plain = torch.minimum(p, q).sum(-1)
    plain_loss = (weights * (0.3 * plain_kl + 3 * (1 - plain))).sum()
    plain_loss.backward()
    torch.testing.assert_close(loss, plain_loss)
    torch.testing.assert_close(acceptance, plain.detach())
    torch.testing.assert_close(kl, plain_kl.detach())
    torch.testing.assert_close(found, student.grad)


def test_progress_is_the_larger_share() -> None:
    """Minutes and steps both end a run; progress never passes 1."""
    budget = Budget(seconds=100.0, max_steps=10)
    assert budget.progress(20.0, 5) == 0.5
    assert budget.progress(80.0, 5) == 0.8
    assert budget.progress(500.0, 5) == 1.0


def test_rate_and_loss_move_as_described() -> None:
    """Warm-up by steps, zero at the end; KL alone at first, the final mix at the end."""
    assert learning_rate(1.0, 0.0, 0, 10) == pytest.approx(0.1)
    assert learning_rate(1.0, 0.5, 99, 10) == pytest.approx(0.5)
    assert learning_rate(1.0, 1.0, 99, 10) == pytest.approx(0.0)
    assert loss_weights(0.0) == LossWeights(1.0, 0.0)
    assert loss_weights(1.0) == LossWeights(
        pytest.approx(FINAL_WEIGHTS.kl), pytest.approx(FINAL_WEIGHTS.tv)
    )


# ---------------------------------------------------------------- student, files, settings


def test_which_layers_and_ids_are_chosen() -> None:
    """Layers from first to last, evenly; the most frequent ids, with those that must be there."""
    assert evenly_spaced(4, 30) == (0, 10, 19, 29)
    assert evenly_spaced(1, 30) == (0,)
    counts = torch.tensor([5, 0, 7, 7, 1])
    assert most_frequent(counts, 2, ()).tolist() == [2, 3]
    assert most_frequent(counts, 2, (1,)).tolist() == [1, 2]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_family_has_its_own_logits(tmp_path: Path, family: str) -> None:
    """The trainable decoder computes what transformers computes, for every family."""
    model = tiny_model(family, vocab_size=tokenizer_files(tmp_path))
    target = load(save(model, tmp_path))
    tokens = torch.arange(20)[None]
    starts = torch.zeros(1, 20, dtype=torch.bool)
    starts[0, 0] = True
    hidden = target(tokens[0], torch.arange(20), packed_attention(starts, "torch"))
    with torch.no_grad():
        torch.testing.assert_close(
            target.logits(hidden), model(tokens).logits[0], rtol=1e-4, atol=1e-4
        )


def test_a_checkpoint_that_cannot_be_written_keeps_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is an error that names --out and the checkpoint that is still there."""
    identity, place = {"seed": 1}, checkpoints.Place(step=3)
    checkpoints.save(tmp_path, identity, place, {"x": torch.ones(2)})

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints.torch, "save", full)
    with pytest.raises(ConfigError, match=r"out: .*No space left.*before it is kept"):
        checkpoints.save(tmp_path, identity, checkpoints.Place(step=4), {"x": torch.ones(2)})
    monkeypatch.undo()
    place, _ = checkpoints.load(tmp_path, identity, CPU)
    assert place.step == 3
    assert [path.name for path in tmp_path.iterdir()] == [checkpoints.FILE]


def test_checkpoints_that_do_not_belong(tmp_path: Path) -> None:
    """Another run's checkpoint, or a damaged one, is refused with the difference."""
    checkpoints.save(tmp_path, {"seed": 1}, checkpoints.Place(), {})
    with pytest.raises(ConfigError, match="seed: 1 there, 2 now"):
        checkpoints.load(tmp_path, {"seed": 2}, CPU)
    (tmp_path / checkpoints.FILE).write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="damaged"):
        checkpoints.load(tmp_path, {"seed": 1}, CPU)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"batch_rows": 6, "micro_rows": 4}, "batch_rows"),
        ({"pool_rows": 9}, "pool_rows"),
        ({"minutes": 0.0}, "minutes"),
        ({"max_steps": None}, "minutes"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"eval_rows": 99}, "eval_rows"),
        ({"reuse": 0}, "reuse"),
        ({"device": "cuda"}, "device"),
    ],
)
def test_settings_that_cannot_work(
    target: Path, tmp_path: Path, changes: dict[str, Any], field: str
) -> None:
    """Each is refused before anything is loaded, and names its flag."""
    if field == "device" and torch.cuda.is_available():
        pytest.skip("this machine has what the test says is missing")
    expected = ConfigError if field == "device" else InvalidRequest
    with pytest.raises(expected) as refused:
        settings(target, tmp_path, **changes).check(1)
    assert refused.value.field == field


def test_disks_and_folders_that_cannot_work(tmp_path: Path) -> None:
    """No room, or a file where the folder should be: an error naming --out."""
    with pytest.raises(ConfigError, match=r"out: .*MiB free"):
        check_space(tmp_path, 1 << 60)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="out: cannot write"):
        check_space(tmp_path / "file" / "folder", 1)


def test_targets_and_starts_that_do_not_fit(target: Path, tmp_path: Path) -> None:
    """Unsupported architecture, another tokenizer, another width, too many ids: said by name."""
    config = json.loads((target / "config.json").read_text())
    odd = tmp_path / "odd"
    odd.mkdir()
    tokenizer_files(odd)
    (odd / "config.json").write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    with pytest.raises(ConfigError, match="unsupported architecture: GPT2LMHeadModel"):
        _read(settings(odd, tmp_path))
    narrow = tiny_target(tmp_path / "narrow", hidden_size=16)
    with pytest.raises(ConfigError, match=r"init_from: .*hidden_size 16, the target 32"):
        _read(settings(target, tmp_path, init_from=narrow))
    other = tiny_target(tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"<s>"', '"<t>"'))
    with pytest.raises(ModelMismatch, match="another tokenizer"):
        _read(settings(target, tmp_path, init_from=other))
    with pytest.raises(InvalidRequest, match="draft_vocab"):
        _read(settings(target, tmp_path, draft_vocab=9999))
    with pytest.raises(InvalidRequest, match="init_layers"):
        _read(settings(target, tmp_path, layers=2, init_layers=(0, 3)))
