"""Bytes that a process sends in one optimizer step, and the time that a link takes to send them.

In a ring of N processes each sends (N - 1) / N of the tensor that is gathered or scattered. An all-reduce is a scatter
and a gather.
"""

from dataclasses import dataclass

from .launch import GRADIENTS, Launch

# DeepSpeed's stage3_max_reuse_distance: a weight used again within so many parameters stays gathered.
REUSE_DISTANCE = 1_000_000_000


@dataclass(frozen=True)
class Traffic:
    """Bytes that a process sends per optimizer step.

    Attributes:
        gather: weights, in the compute dtype.
        reduce: gradients.
    """

    gather: float
    reduce: float

    @property
    def total(self) -> float:
        return self.gather + self.reduce

    def seconds(self, bandwidth: float) -> float:
        """Time at `bandwidth` bytes per second and direction, without overlap with computation."""
        return self.total / bandwidth


def traffic(
    parameters: float,
    launch: Launch,
    accumulation: int = 1,
    sync_each_batch: bool = False,
    gather_bytes: float = 4,
    reduce_bytes: float = 4,
) -> Traffic:
    """The traffic of an optimizer step of `accumulation` batches.

    Full sharding gathers the weights twice per batch, SHARD_GRAD_OP once (FSDP version 1 once per step, since it keeps
    them between batches). Gradients are reduced once per step; after every batch by DeepSpeed's stages 2 and 3, and by
    FSDP with `sync_each_batch`. Stage 2 all-reduces them (`use_multi_rank_bucket_allreduce`). Stage 3 does not gather
    again the weights that are still gathered in the backward pass. Replicas of a hybrid all-reduce their shards.

    Args:
        gather_bytes, reduce_bytes: bytes per parameter.
    """
    strategy = launch.strategy
    is_deepspeed = strategy.engine == "deepspeed"
    reduces_each = GRADIENTS in strategy.shared and (sync_each_batch or is_deepspeed)
    reductions = accumulation if reduces_each else 1
    if not strategy.shared:
        # An all-reduce is two passes over all processes.
        sent = _share(launch.world_size) * parameters
        return Traffic(0, 2 * sent * reduce_bytes * reductions)
    # What a process sends of one number for each parameter.
    sent = _share(launch.parts) * parameters
    reduce = sent * reduce_bytes * reductions
    if not strategy.gathers:
        if is_deepspeed and GRADIENTS in strategy.shared:
            reduce *= 2
        # The updated weights are gathered once per step, in fp32.
        return Traffic(sent * 4, reduce)
    gathers = 2 * accumulation
    if is_deepspeed:
        # Between a weight's forward and its backward, every later weight is used twice.
        used_again = min(1, REUSE_DISTANCE / 2 / parameters)
        gathers -= accumulation * used_again
    if strategy.keeps_gathered:
        gathers = 1 if strategy.engine == "fsdp1" and not sync_each_batch else accumulation
    if launch.replicas > 1:
        between = 2 * _share(launch.replicas) * parameters / launch.parts
        reduce += between * reduce_bytes * reductions
    return Traffic(gathers * sent * gather_bytes, reduce)


def _share(processes: int) -> float:
    """The share of a tensor that each process sends where it is gathered or scattered."""
    return (processes - 1) / processes
