"""A rehearsed rank takes the bytes and the FLOPs of that rank among real ones.

Both run the same steps on the same weights and pack. How many rows the router of every other rank
sends is all that a rehearsal cannot know, so here it is told: the counts that arrived at the real
rank, in their order.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fullspan.parallel import expert
from fullspan.parallel.collectives import PendingTensor
from fullspan.planning.case import Case
from fullspan.planning.rehearse import Stage
from fullspan.planning.stand_in import SyntheticRanks, synthetic_pack
from fullspan.shapes import Tensor
from fullspan.train.config import RunConfig
from fullspan.train.setup import open_session
from tests.support.memory import peak_and_flops
from tests.support.ranks import run_ranks
from tests.support.runs import mesh_of, run_config

LENGTH = 384  # the tiny checkpoint's index_topk is 64
SPLITS: list[dict[str, Any]] = [
    {"cp": 2, "ep": 2, "balance_indexer": "on"},
    {"cp": 4, "ep": 2, "shard_weights": True},
    {"dp": 2, "cp": 2, "ep": 4},
]
CPU = torch.device("cpu")
# Seconds after which gloo's threads have let go of a tensor: what they free last, the profiler of
# this thread does not see.
LET_GO = 0.003


class _Replay(SyntheticRanks):
    """Other ranks that send as many rows to each expert as they once did."""

    def replay(self, counts: list[Tensor]) -> None:
        self._counts = iter(counts)

    def counts(self, incoming: Tensor, outgoing: Tensor) -> None:
        incoming.copy_(next(self._counts))


def _real(rank: int, size: int, config: RunConfig) -> tuple[int, int, list[Tensor]]:
    """Peak bytes and FLOPs of the second step, and the counts that arrived in both."""
    arrived: list[Tensor] = []
    exchange, wait = expert.all_to_all_rows, PendingTensor.wait

    def observed(*args: Any, **kwargs: Any) -> Tensor:
        out = exchange(*args, **kwargs)
        if out.dtype == torch.int64:
            arrived.append(out.clone())
        time.sleep(LET_GO)
        return out

    def patient(self: PendingTensor) -> Tensor:
        work = self._work
        out = wait(self)
        time.sleep(LET_GO)
        del work
        return out

    # In this process, which ends with the function.
    expert.all_to_all_rows, PendingTensor.wait = observed, patient
    parallel = config.parallel
    session, _ = open_session(config, mesh_of(**vars(parallel)))
    vocab = session.model.config.vocab_size
    pack = synthetic_pack(LENGTH, document=0, trained=1.0, vocab=vocab)

    def step() -> None:
        session.forward_backward([pack] * parallel.dp)
        session.optim_step()

    step()
    return *peak_and_flops(step), arrived


def _rehearsed(config: RunConfig, rank: int, counts: list[Tensor]) -> tuple[int, int]:
    stage = Stage(Case.load(config, world=None), rank, CPU, others=_Replay)
    assert isinstance(stage.others, _Replay)
    stage.others.replay(counts)
    session = stage.open()
    stage.step(session, LENGTH)
    return peak_and_flops(lambda: stage.step(session, LENGTH))


@pytest.mark.parametrize("parallel", SPLITS, ids=str)
def test_a_rehearsed_rank_takes_what_the_real_one_takes(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, parallel: dict[str, Any]
) -> None:
    folder = tiny_checkpoints["glm_moe_dsa"]
    ops = {"workspace_bytes": 1 << 21, "expert_bytes": 1 << 20, "loss_chunk_rows": 32}
    data = {"pack_length": LENGTH}
    config = run_config(folder, tmp_path, "run", parallel=parallel, data=data, ops=ops)
    world = parallel.get("dp", 1) * parallel["cp"]
    real = run_ranks(world, _real, config)
    for rank in (0, world - 1):
        peak, flops, counts = real[rank]
        rehearsed_peak, rehearsed_flops = _rehearsed(config, rank, counts)
        assert rehearsed_peak == pytest.approx(peak, rel=0.02), rank
        assert rehearsed_flops == flops, rank
