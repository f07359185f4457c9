"""The AdamW update, torch's own fused kernel."""

from torch import Tensor, zeros_like
from torch.optim.adamw import adamw

from .sharding import own_part


class AdamWRule:
    """AdamW with decoupled weight decay, bit-equal to `torch.optim.AdamW(fused=True)`.

    Group keys: `lr`, `betas` (two decay rates), `eps`, `weight_decay`.
    State: `exp_avg` and `exp_avg_sq`, shaped and typed as the parameter; `step` comes from the clock.
    """

    @staticmethod
    def initial_state(parameter: Tensor) -> dict[str, Tensor]:
        """Moments at zero for one parameter."""
        return {"exp_avg": zeros_like(parameter), "exp_avg_sq": zeros_like(parameter)}

    @staticmethod
    def update(parameters: list[Tensor], gradients: list[Tensor], states: list[dict[str, Tensor]], group: dict):
        """Change `parameters` and `states` in place by one step."""
        beta1, beta2 = group["betas"]
        # Element-wise: each process updates its own part of a sharded parameter.
        parameters, gradients = ([own_part(tensor) for tensor in tensors] for tensors in (parameters, gradients))
        # Fused is the fastest on CPU too: 8 ms for 10 M parameters on two cores, against 29 (foreach) and 39 (loop).
        adamw(
            parameters,
            gradients,
            [own_part(state["exp_avg"]) for state in states],
            [own_part(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
