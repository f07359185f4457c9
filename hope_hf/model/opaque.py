"""Functions that stay one operator of a compiled graph, however long the text is.

`torch.compile` and its backends unroll loops: the graph of a scan has a part per chunk of the text, and every other
length is another graph. A function that is called through `call` is one operator instead. The tracer asks for the
shapes of its results alone; when the graph runs, the function runs as it would without a graph, with loops and sizes
that depend on the values of tensors, and autograd differentiates it.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch

# what a function gets: its tensors by name, numbers that may differ from call to call, and a description of the rest
Arguments = tuple[dict[str, torch.Tensor], Sequence[int], str]
# every copy of this code has its own operators
_SPACE = re.sub(r"\W", "_", __name__)


class Opaque(NamedTuple):
    """A function of `Arguments`, which returns tensors that share no memory with its arguments or one another."""

    run: Callable[..., list[torch.Tensor]]
    # the same arguments; tensors with the shapes and dtypes of the results
    shapes: Callable[..., list[torch.Tensor]]


_FUNCTIONS: dict[str, Opaque] = {}


def register(name: str, run: Callable, shapes: Callable) -> None:
    """Give a function the name by which graphs know it."""
    _FUNCTIONS[name] = Opaque(run, shapes)


def call(name: str, tensors: dict[str, torch.Tensor | None], sizes: list[int], options: str) -> list[torch.Tensor]:
    """The results of the function of that name; tensors that are `None` are left out."""
    present = {key: tensor for key, tensor in tensors.items() if tensor is not None}
    has_gradients = torch.is_grad_enabled()
    needs = [has_gradients and tensor.requires_grad for tensor in present.values()]
    *results, _ = _run(name, list(present.values()), ",".join(present), sizes, options, needs)
    return results


def named_tuple(kind: type[tuple], tensors: dict[str, torch.Tensor]) -> tuple | None:
    """The NamedTuple whose fields are among the tensors, or `None`."""
    if kind._fields[0] not in tensors:
        return None
    return kind(*(tensors[name] for name in kind._fields))


@contextmanager
def _recording(records: bool):
    """Autograd inside of an operator, where torch leaves it out."""
    with ExitStack() as stack:
        for key in ("AutogradFunctionality", "ADInplaceOrView"):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(getattr(torch._C.DispatchKey, key), False))
        stack.enter_context(torch.set_grad_enabled(records))
        yield


def _record(name, tensors, names, sizes, options, needs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that need a gradient, and the results, with autograd's graph between the two."""
    leaves = {}
    with _recording(any(needs)), torch.autocast(tensors[0].device.type, enabled=False):
        for key, tensor, need in zip(names.split(","), tensors, needs, strict=True):
            leaves[key] = tensor.detach().requires_grad_(need)
        results = _FUNCTIONS[name].run(leaves, sizes, options)
    return [leaf for leaf in leaves.values() if leaf.requires_grad], results


# An operator of any name that `torch.compile` splits CUDA graphs at, since it reads sizes from the device.
@torch.library.custom_op(f"{_SPACE}::run", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _run(
    name: str,
    tensors: Sequence[torch.Tensor],
    names: str,
    sizes: Sequence[int],
    options: str,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    """The results, and an empty tensor that carries autograd's graph to the backward pass."""
    leaves, results = _record(name, tensors, names, sizes, options, needs)
    carrier = tensors[0].new_empty(0)
    if leaves:
        carrier.recorded = leaves, results
    return [*(result.detach().contiguous() for result in results), carrier]


@_run.register_fake
def _(name, tensors, names, sizes, options, needs):
    results = _FUNCTIONS[name].shapes(dict(zip(names.split(","), tensors, strict=True)), sizes, options)
    # made anew, since a tensor that stands twice in the list would be one result to the graph
    return [*(result.new_empty(result.shape) for result in results), tensors[0].new_empty(0)]


@torch.library.custom_op(f"{_SPACE}::differentiate", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _differentiate(
    name: str,
    tensors: Sequence[torch.Tensor],
    names: str,
    sizes: Sequence[int],
    options: str,
    needs: Sequence[bool],
    carrier: torch.Tensor,
    gradients: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    """Gradients of the tensors that need one."""
    # A second backward pass, or a backend that made another tensor of the carrier, runs the function again.
    recorded = carrier.__dict__.pop("recorded", None)
    leaves, results = recorded or _record(name, tensors, names, sizes, options, needs)
    outputs, grad_outputs = [], []
    for result, gradient in zip(results, gradients, strict=True):
        # a result may depend on none of the tensors that need one
        if gradient is not None and result.requires_grad:
            outputs.append(result)
            grad_outputs.append(gradient)
    with _recording(True):
        grad_leaves = torch.autograd.grad(outputs, leaves, grad_outputs, allow_unused=True, materialize_grads=True)
    return [gradient.contiguous() for gradient in grad_leaves]


@_differentiate.register_fake
def _(name, tensors, names, sizes, options, needs, carrier, gradients):
    return [tensor.new_empty(tensor.shape) for tensor, need in zip(tensors, needs, strict=True) if need]


def _keep(ctx, inputs, output) -> None:
    ctx.name, tensors, ctx.names, ctx.sizes, ctx.options, ctx.needs = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[-1])


def _backward(ctx, gradients):
    *tensors, carrier = ctx.saved_tensors
    found = _differentiate(
        ctx.name, tensors, ctx.names, ctx.sizes, ctx.options, ctx.needs, carrier, list(gradients[:-1])
    )
    remaining = iter(found)
    grad_tensors = [next(remaining) if need else None for need in ctx.needs]
    # torch takes an empty list of numbers for one of tensors
    grad_sizes = None if ctx.sizes else []
    return None, grad_tensors, None, grad_sizes, None, None


_run.register_autograd(_backward, setup_context=_keep)
