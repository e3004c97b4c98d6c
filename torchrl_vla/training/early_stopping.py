"""When supervised fine-tuning ends, and with which weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor


class HasState(Protocol):
    """What has a ``state_dict`` and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any) -> Any: ...


class EarlyStopping:
    """Keep the weights of the best validation, and say when to stop.

    Without validation the last weights are the best.

    Args:
        weights: of the policy, see :class:`TrainedWeights`.
        stop_on: ``val_token_accuracy`` (higher is better) or ``val_loss``. In training
            on few demonstrations the loss grows with confidence while ever more tokens
            are right, so accuracy is the default.
        patience: iterations in a row that were not the best.
    """

    def __init__(
        self,
        weights: HasState,
        stop_on: str = "val_token_accuracy",
        patience: int = 15,
    ) -> None:
        self.weights = weights
        self.stop_on = stop_on
        self.patience = patience
        self.best_value: float | None = None
        self.best_iteration = 0
        self.num_worse = 0
        self._best: dict[str, Tensor] | None = None

    @property
    def is_over(self) -> bool:
        """Whether patience is at an end."""
        return self.num_worse >= self.patience

    def update(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Take note of a validation."""
        value = metrics.get(self.stop_on)
        if value is None:
            self.best_iteration = iteration
            return
        sign = -1 if self.stop_on == "val_loss" else 1
        if self.best_value is None or sign * value > sign * self.best_value:
            self.best_value, self.best_iteration, self.num_worse = value, iteration, 0
            self._best = _copy(self.weights.state_dict())
        else:
            self.num_worse += 1

    @contextmanager
    def best_weights(self) -> Iterator[None]:
        """Inside, the policy has the weights of the best validation."""
        if self._best is None:
            yield
            return
        now = _copy(self.weights.state_dict())
        self.load_best()
        try:
            yield
        finally:
            self.weights.load_state_dict(now)

    def load_best(self) -> None:
        """Give the policy the weights of the best validation, for good."""
        if self._best is not None:
            self.weights.load_state_dict(self._best)

    def state_dict(self) -> dict[str, Any]:
        """The best weights and where they were found."""
        return {
            "best_value": self.best_value,
            "best_iteration": self.best_iteration,
            "num_worse": self.num_worse,
            "best": self._best,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_value = state["best_value"]
        self.best_iteration = state["best_iteration"]
        self.num_worse = state["num_worse"]
        self._best = state["best"]


def _copy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in state.items()}
