"""Functions that stay one operator of a compiled graph, however long the text is.

`torch.compile` and its backends unroll loops: the graph of a scan has a part per chunk of the text, and every other
length is another graph. A function that is called through `call` is one operator instead. The tracer asks for the
shapes of its results alone; when the graph runs, the function runs as it would without a graph, with loops and sizes
that depend on the values of tensors, and autograd differentiates it.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

# by name
Tensors = dict[str, Tensor]
# every copy of this code has its own operators
_SPACE = re.sub(r"\W", "_", __name__)


class Opaque(NamedTuple):
    """A function of tensors, of numbers that may differ from call to call, and of a description of the rest.

    It returns tensors that share no memory with its arguments or one another.
    """

    run: Callable[..., list[Tensor]]
    # the same arguments; tensors with the shapes and dtypes of the results
    shapes: Callable[..., list[Tensor]]


_FUNCTIONS: dict[str, Opaque] = {}


def register(name: str, run: Callable, shapes: Callable) -> None:
    """Give a function the name by which graphs know it."""
    _FUNCTIONS[name] = Opaque(run, shapes)


def call(
    name: str,
    tensors: dict[str, Tensor | None],
    sizes: list[int],
    options: str,
) -> list[Tensor]:
    """The results of the function of that name; tensors that are `None` are left out."""
    names = []
    present = []
    needs_gradient = []
    for tensor_name, tensor in tensors.items():
        if tensor is not None:
            names.append(tensor_name)
            present.append(tensor)
            needs_gradient.append(torch.is_grad_enabled() and tensor.requires_grad)
    joined_names = ",".join(names)
    *results, _ = _run(name, present, joined_names, sizes, options, needs_gradient)
    return results


def named_tuple(kind: type[tuple], tensors: Tensors) -> tuple | None:
    """The NamedTuple whose fields are among the tensors, or `None`."""
    if kind._fields[0] not in tensors:
        return None
    return kind(*map(tensors.get, kind._fields))


@contextmanager
def seeded(tensors: Tensors) -> Iterator[None]:
    """Random numbers from the tensor `seed`, if it is given, since the backward pass may run a function again."""
    seed = tensors.get("seed")
    devices = [seed.device] if seed is not None and seed.is_cuda else []
    with torch.random.fork_rng(devices, enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(int(seed))
        yield


@contextmanager
def _autograd(records: bool) -> Iterator[None]:
    """Autograd inside of an operator, where torch leaves it out."""
    leave_out = torch._C._SetExcludeDispatchKeyGuard
    keys = torch._C.DispatchKey
    with (
        leave_out(keys.AutogradFunctionality, False),
        leave_out(keys.ADInplaceOrView, False),
        torch.set_grad_enabled(records),
    ):
        yield


def _record(
    name: str,
    tensors: Sequence[Tensor],
    names: str,
    sizes: Sequence[int],
    options: str,
    needs_gradient: Sequence[bool],
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that need a gradient, and the results, with autograd's graph between the two."""
    arguments = {}
    leaves = []
    device = tensors[0].device.type
    with _autograd(any(needs_gradient)), torch.autocast(device, enabled=False):
        for tensor_name, tensor, needed in zip(names.split(","), tensors, needs_gradient, strict=True):
            argument = tensor.detach().requires_grad_(needed)
            arguments[tensor_name] = argument
            if needed:
                leaves.append(argument)
        results = _FUNCTIONS[name].run(arguments, sizes, options)
    return leaves, results


# An operator of any name that `torch.compile` splits CUDA graphs at, since it reads sizes from the device.
@torch.library.custom_op(f"{_SPACE}::run", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _run(
    name: str,
    tensors: Sequence[Tensor],
    names: str,
    sizes: Sequence[int],
    options: str,
    needs_gradient: Sequence[bool],
) -> list[Tensor]:
    """The results, and an empty tensor that carries autograd's graph to the backward pass."""
    leaves, results = _record(name, tensors, names, sizes, options, needs_gradient)
    carrier = tensors[0].new_empty(0)
    if leaves:
        carrier.recorded = leaves, results
    outputs = [result.detach().contiguous() for result in results]
    outputs.append(carrier)
    return outputs


@_run.register_fake
def _(name, tensors, names, sizes, options, needs_gradient):
    arguments = dict(zip(names.split(","), tensors, strict=True))
    results = _FUNCTIONS[name].shapes(arguments, sizes, options)
    # made anew, since a tensor that stands twice in the list would be one result to the graph
    outputs = [result.new_empty(result.shape) for result in results]
    outputs.append(tensors[0].new_empty(0))
    return outputs


@torch.library.custom_op(f"{_SPACE}::differentiate", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _differentiate(
    name: str,
    tensors: Sequence[Tensor],
    names: str,
    sizes: Sequence[int],
    options: str,
    needs_gradient: Sequence[bool],
    carrier: Tensor,
    gradients: Sequence[Tensor | None],
) -> list[Tensor]:
    """Gradients of the tensors that need one."""
    # A second backward pass, or a backend that made another tensor of the carrier, runs the function again.
    recorded = carrier.__dict__.pop("recorded", None)
    if recorded is None:
        recorded = _record(name, tensors, names, sizes, options, needs_gradient)
    leaves, results = recorded
    outputs = []
    grad_outputs = []
    for result, gradient in zip(results, gradients, strict=True):
        # a result may depend on none of the tensors that need one
        if gradient is not None and result.requires_grad:
            outputs.append(result)
            grad_outputs.append(gradient)
    with _autograd(True):
        grad_leaves = torch.autograd.grad(
            outputs,
            leaves,
            grad_outputs,
            allow_unused=True,
            materialize_grads=True,
        )
    return [gradient.contiguous() for gradient in grad_leaves]


@_differentiate.register_fake
def _(name, tensors, names, sizes, options, needs_gradient, carrier, gradients):
    grad_leaves = []
    for tensor, needed in zip(tensors, needs_gradient, strict=True):
        if needed:
            grad_leaves.append(tensor.new_empty(tensor.shape))
    return grad_leaves


def _keep(ctx, inputs, output) -> None:
    name, tensors, *ctx.description = inputs
    ctx.name = name
    ctx.set_materialize_grads(False)
    carrier = output[-1]
    ctx.save_for_backward(*tensors, carrier)


def _backward(ctx, gradients):
    *tensors, carrier = ctx.saved_tensors
    _, sizes, _, needs_gradient = ctx.description
    grad_results = list(gradients[:-1])
    grad_leaves = _differentiate(ctx.name, tensors, *ctx.description, carrier, grad_results)
    remaining = iter(grad_leaves)
    grad_tensors = []
    for needed in needs_gradient:
        grad_tensors.append(next(remaining) if needed else None)
    # torch takes an empty list of numbers for one of tensors
    grad_sizes = None if sizes else []
    return None, grad_tensors, None, grad_sizes, None, None


_run.register_autograd(_backward, setup_context=_keep)
