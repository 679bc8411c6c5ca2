"""Rounds with candidates and plain decoding in one chain of passes, as the target has it."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.sampling import Rule, Status
from specmesh.engine.step_buffers import Field, StepInputs, StepOutputs
from specmesh.engine.step_programs import ProgramBuffers, StepShape
from target_service.device_verifier import UNUSED, TargetSampler

VOCAB = 97
CPU = torch.device("cpu")
SHAPE = StepShape(num_seqs=2, max_query_len=3, num_passes=2, rows_per_seq=3, num_ids=256)


def buffers_of(sampler: TargetSampler, *, with_round: bool) -> ProgramBuffers:
    """Slot 0: a round of two candidates, or padding. Slot 1: plain decoding."""
    inputs = StepInputs([Field("context_lens", (2,)), *sampler.input_fields(SHAPE)], CPU)
    host = inputs.host
    host["context_lens"][:] = 9, 7
    host["base_lens"][:] = 7, 7
    host["seeds"][:] = 3, 4
    host["temperatures"][:] = 1.0
    host["top_ps"][:] = 1.0
    host["rules"][:] = int(Rule.RESIDUAL)
    host["stop_ids"].fill(-1)
    host["num_candidates"][:] = UNUSED, 0
    host["later_candidates"][:] = UNUSED, 0
    host["draft_ids"].fill(-1)
    if with_round:
        host["num_candidates"][0] = 2
        host["candidates"][0] = 5, 6
        host["draft_ids"][0, :, 0] = 5, 6  # the whole law on one id each: the re-draw agrees
        host["draft_weights"][0, :, 0] = 1.0
    inputs.upload()
    return ProgramBuffers(inputs, StepOutputs(sampler.output_fields(SHAPE), CPU))


def two_passes(*, with_round: bool) -> tuple[Tensor, Tensor]:
    """(tokens [pass, slot, row], counts [pass, slot, 3])."""
    sampler = TargetSampler(VOCAB, 2, CPU)
    buffers = buffers_of(sampler, with_round=with_round)
    generator = torch.Generator().manual_seed(1)
    for index, rows in ((0, 6), (1, 2)):
        logits = torch.randn(rows, VOCAB, generator=generator)
        sampler.sample(logits, buffers, SHAPE, index, is_fed_by_host=index == 0)
    outputs = buffers.outputs.device
    return outputs["tokens"].clone(), outputs["counts"].clone()


def test_a_round_ends_with_the_first_pass_of_a_chain() -> None:
    """Proves that no later pass judges candidates again, and that plain decoding beside a round
    draws what it draws alone."""
    tokens, counts = two_passes(with_round=True)
    assert counts[0, 0, 1] >= 1
    assert counts[0, 0, 2] == int(Status.OK)
    assert counts[1, 0].tolist() == [0, 0, int(Status.OK)]
    assert tokens[1, 0, 0] == -1
    alone, alone_counts = two_passes(with_round=False)
    assert torch.equal(tokens[:, 1, 0], alone[:, 1, 0])
    assert counts[:, 1].tolist() == alone_counts[:, 1].tolist() == [[0, 1, 0], [0, 1, 0]]
