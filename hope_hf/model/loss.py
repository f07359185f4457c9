"""The next-token loss with the logits of some tokens at a time, never those of a whole text.

The logits of a text and their gradients take [tokens, vocabulary] numbers each, most of the memory of a small model's
training step. Here the forward pass computes the logits of a chunk of tokens and, right away, the gradients of hidden
states and weight for a loss of 1, which the backward pass scales (as in Liger-Kernel, arXiv 2410.10989). It takes as
many operations as the plain loss.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .backends import asked_kernels, is_compiled, is_transformed, once_differentiable, operand_dtype
from .opaque import Tensors, call, register

IGNORED = -100
# Rows of the weight's gradient per step: torch holds a second float32 copy of the rows that are summed or rounded.
_ROWS = 8192


class _Loss(torch.autograd.Function):
    """`linear_cross_entropy` as one autograd node; `has_backward`: whether its gradients are made."""

    @staticmethod
    def forward(ctx, hidden, weight, labels, has_backward):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # `needs_input_grad` is true for leaves even under `no_grad`
        hidden_learns, weight_learns, *_ = ctx.needs_input_grad
        grad_hidden = grad_weight = None
        if has_backward and hidden_learns:
            grad_hidden = torch.empty_like(hidden)
        if has_backward and weight_learns:
            # wider dtype, since the gradient sums many chunks
            grad_weight = torch.zeros_like(weight, dtype=wide)
        # CPUs make the gradients in the memory of the logits. Chunks have as many of both as the weight has numbers.
        in_place = hidden.is_cpu and hidden.dtype == wide
        chunk = hidden.shape[-1]
        if not in_place:
            chunk = max(1, chunk // 2)
        loss = hidden.new_zeros((), dtype=wide)
        for start in range(0, len(hidden), chunk):
            tokens = slice(start, start + chunk)
            targets = labels[tokens, None]
            ignored = targets == IGNORED
            targets = targets.masked_fill(ignored, 0)
            hidden_chunk = hidden[tokens].masked_fill(ignored, 0.0)
            logits = hidden_chunk @ weight.mT
            losses, shares = _losses_and_shares(logits, targets, wide, in_place)
            loss += losses.masked_fill_(ignored, 0.0).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            # softmax minus one-hot
            minus_one = shares.new_full((), -1.0).expand_as(targets)
            grad_logits = shares.scatter_add_(-1, targets, minus_one)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_chunk = grad_hidden[tokens]
                torch.mm(grad_logits, weight, out=grad_chunk)
                grad_chunk.masked_fill_(ignored, 0.0)
            if grad_weight is not None:
                _add_weight_gradient(grad_weight, grad_logits, hidden_chunk)
        is_scored = (labels != IGNORED).any()
        ctx.save_for_backward(grad_hidden, grad_weight, is_scored)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, scale):
        grad_hidden, grad_weight, is_scored = ctx.saved_tensors
        # a mean over no token scales by 1 / 0, and 0 times that is no gradient
        scale = torch.where(is_scored, scale, 0.0)
        if grad_hidden is not None:
            scaled = grad_hidden * scale
            grad_hidden = scaled.to(grad_hidden.dtype)
        if grad_weight is not None:
            scaled = torch.empty_like(grad_weight, dtype=ctx.weight_dtype)
            rows_of_gradient = grad_weight.split(_ROWS)
            rounded_rows = scaled.split(_ROWS)
            for rows, rounded in zip(rows_of_gradient, rounded_rows, strict=True):
                torch.mul(rows, scale, out=rounded)
            grad_weight = scaled
        return grad_hidden, grad_weight, None, None


def _losses_and_shares(logits: Tensor, targets: Tensor, wide: torch.dtype, in_place: bool) -> tuple[Tensor, Tensor]:
    """Losses [N, 1] and softmax [N, V] of logits [N, V] with targets [N, 1], in `wide`; `in_place` of the logits."""
    largest = logits.amax(-1, keepdim=True).to(wide)
    below_largest = largest - logits.gather(-1, targets)
    place = logits if in_place else None
    shares = torch.softmax(logits, -1, dtype=wide, out=place)
    # The largest share is 1 over the sum of exponentials. The target's may be 0 in float32.
    log_largest = shares.amax(-1, keepdim=True).log_()
    losses = below_largest - log_largest
    return losses, shares


def _add_weight_gradient(grad_weight: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Add `grad_logits^T hidden` of a chunk's tokens to the gradient [V, D], which may be of a wider dtype."""
    if grad_weight.dtype == hidden.dtype:
        grad_weight.addmm_(grad_logits.mT, hidden)
        return
    columns = grad_logits.split(_ROWS, dim=1)
    for rows, columns_of_rows in zip(grad_weight.split(_ROWS), columns, strict=True):
        rows += columns_of_rows.mT @ hidden


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`cross_entropy(linear(hidden, weight), labels, reduction="sum")`: nats, float32 (float64 if `hidden` is).

    Args:
        hidden: [N, D].
        weight: [V, D]; the product is made in `hidden`'s dtype, or that of autocast.
        labels: [N] from 0 to V - 1; -100 is not scored.
    """
    dtype = operand_dtype(hidden)
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = hidden.to(dtype)
        weight = weight.to(dtype)
        if is_compiled():
            tensors = {"hidden": hidden, "weight": weight, "labels": labels}
            return call("loss", tensors, [], "")[0]
        return _Loss.apply(hidden, weight, labels, torch.is_grad_enabled())


def _summed(tensors: Tensors, *_) -> list[Tensor]:
    """`linear_cross_entropy` as one operator of a compiled graph."""
    loss = _Loss.apply(*tensors.values(), torch.is_grad_enabled())
    return [loss]


def _shape(tensors: Tensors, *_) -> list[Tensor]:
    hidden = tensors["hidden"]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return [hidden.new_empty((), dtype=wide)]


register("loss", _summed, _shape)


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed loss in nats of logits [..., V] and labels [...], float32 or wider; -100 is not scored."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.flatten(0, -2).to(wide)
    return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")


class HopeHead(nn.Linear):
    """Logits [..., V] of hidden states [..., D], or with labels [...] their summed loss.

    `forward` computes both, since sharding engines gather a module's weight for its forward. Unless `weight_learns`,
    the loss spares the weight's gradient; where it is made of all logits (plain code, quantised weights, torch.func),
    it ignores this.
    """

    is_head = True

    def __init__(self, width: int, vocab_size: int):
        super().__init__(width, vocab_size, bias=False)

    def forward(self, hidden_states: Tensor, labels: Tensor | None = None, weight_learns: bool = True) -> Tensor:
        if labels is None:
            return super().forward(hidden_states)
        # The tracer supports none of the checks.
        if not torch.compiler.is_compiling():
            # Other tensor classes than torch's, such as quantised weights, may support no product but `nn.Linear`'s.
            package, *_ = type(self.weight).__module__.split(".")
            if package != "torch" or is_transformed() or asked_kernels() == "plain":
                return summed_cross_entropy(super().forward(hidden_states), labels)
        # the loss would make the weight's gradient at once
        weight = self.weight if weight_learns else self.weight.detach()
        tokens = hidden_states.flatten(0, -2)
        return linear_cross_entropy(tokens, weight, labels.flatten())

    def mean_loss(self, hidden_states, labels, num_items_in_batch=None, shift_labels=None, **_) -> Tensor:
        """The result of transformers' `loss_function`, computed without the logits of all tokens."""
        if shift_labels is None:
            shift_labels = next_labels(labels)
        shift_labels = shift_labels.to(hidden_states.device)
        count = num_items_in_batch
        if count is None:
            count = (shift_labels != IGNORED).sum()
        elif isinstance(count, Tensor):
            count = count.to(hidden_states.device)
        return self(hidden_states, shift_labels) / count


def next_labels(labels: Tensor) -> Tensor:
    """The label of each position's next token [B, T], from labels that are the tokens themselves."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


def with_ignored(labels: Tensor | None, ignore_index: int) -> Tensor | None:
    """Labels with -100 in place of `ignore_index`."""
    return None if labels is None else labels.masked_fill(labels == ignore_index, IGNORED)
