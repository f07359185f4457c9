"""The factor of the loss in fp16, which keeps small gradients from vanishing, and its lower bound.

Both kinds double the factor after many good steps and halve it if gradients overflow. An engine without fp16 has
none. All processes have the same scale, since they agree on overflows.
"""

import torch


class TorchScaling:
    """`torch.amp.GradScaler`, or FSDP1's, as accelerate makes it; kept at 1 or above."""

    LEAST = 1.0

    def __init__(self, scaler: torch.amp.GradScaler):
        self._scaler = scaler

    @property
    def scale(self) -> float:
        """The factor of gradients between backward and step."""
        return self._scaler.get_scale()

    @property
    def can_fall(self) -> bool:
        """Whether an overflow lowers it; at the minimum a non-finite gradient comes from the model, not the scale."""
        return self.scale > self.LEAST

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Update the weights with gradients that `clip` has unscaled and found finite."""
        self._scaler.step(optimizer)
        self._scaler.update()

    def skip(self, lower: bool) -> None:
        """Skip a step: its gradients are dropped between backward and update."""
        scale = self.scale
        if lower:
            scale = max(self.LEAST, scale * self._scaler.get_backoff_factor())
        # Setting a scale also clears the scaler's check of the gradients.
        self._scaler.update(scale)
        if lower:
            self.load({"scale": self.scale, "good_steps": 0})

    def state(self) -> dict[str, float]:
        """`scale`, `good_steps` since it last changed, and fields that only one kind has; JSON-able."""
        return {"scale": self.scale, "good_steps": self._scaler.state_dict()["_growth_tracker"]}

    def load(self, state: dict[str, float]) -> None:
        """Continue from `state()`, also of the other kind."""
        saved = {"scale": state["scale"], "_growth_tracker": state["good_steps"]}
        self._scaler.load_state_dict(self._scaler.state_dict() | saved)


class DeepSpeedScaling:
    """The scaler inside a ZeRO optimizer, which lowers and raises its scale by itself in the optimizer's `step()`."""

    def __init__(self, scaler):
        self._scaler = scaler
        # The trainer ends such a run itself, with its own message.
        scaler.raise_error_at_min_scale = False

    @property
    def scale(self) -> float:
        return float(self._scaler.cur_scale)

    @property
    def can_fall(self) -> bool:
        # A scale that is fixed in the DeepSpeed configuration never falls.
        return self._scaler.dynamic and self.scale > self._scaler.min_scale

    def state(self) -> dict[str, float]:
        if not self._scaler.dynamic:
            return {"scale": self.scale, "good_steps": 0}
        good_steps = self._scaler.cur_iter - self._scaler.last_overflow_iter - 1
        return {"scale": self.scale, "good_steps": good_steps, "hysteresis": self._scaler.cur_hysteresis}

    def load(self, state: dict[str, float]) -> None:
        if self._scaler.dynamic:
            self._scaler.cur_scale = state["scale"]
            self._scaler.cur_iter, self._scaler.last_overflow_iter = state["good_steps"], -1
            self._scaler.cur_hysteresis = state.get("hysteresis", self._scaler.delayed_shift)


LossScaling = TorchScaling | DeepSpeedScaling
