"""TorchRL's toy tracking task with numbered initial states."""

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, Unbounded
from torchrl.envs.custom import ToyVLAEnv

from torchrl_vla.data import keys
from torchrl_vla.data.random_streams import derive_seed, uniform


class ToyTaskEnv(ToyVLAEnv):
    """``ToyVLAEnv`` in tracking mode, as a task with initial states and a step limit.

    The hand must stay within ``success_tol`` of a target for ``success_steps`` env
    steps in a row. The target is a pure function of ``(seed, init_state_id)``, so all
    members of a group start bit-identically in any process. The reward is 1 at success
    and 0 before, as on LIBERO. The image shows the first two action dimensions: a green
    field of the tolerance's size around the target, and the hand in red.

    ``torchrl.envs.custom.ToyVLAEnv`` draws targets in the order of resets, has a dense
    reward, noise for an image and no step limit, and can repeat a start only where it
    is not batched.

    Args:
        num_envs: ``N``, members stepped at once; the batch size is ``[N]``.
        max_episode_steps: env steps after which an episode is truncated.
        seed: names the list of initial states.
        image_size: px.
        action_dim, state_dim, success_steps, success_tol: see ``ToyVLAEnv``.

    ``reset(tensordict, task_id=..., init_state_id=...)`` starts the members named by
    ``"_reset"`` from the given initial states (int64, one number or ``[N]``); without
    them each reset takes the next numbers. There is one task, number 0.

    Keys written: ``("observation", "image")`` uint8 ``[3, image_size, image_size]``,
    ``("observation", "state")`` float32 ``[S]`` (last action, target, zeros),
    ``"language_instruction"``, ``"task_id"`` and ``"init_state_id"`` int64 ``[1]``,
    ``"success"`` bool ``[1]``, reward, ``done``, ``terminated``, ``truncated``.

    Raises:
        ValueError: for another task, a negative initial state, NaN in an action.

    Example:
        >>> env = ToyTaskEnv(num_envs=2, seed=0)
        >>> td = env.reset(init_state_id=5)
        >>> bool((td["observation", "image"][0] == td["observation", "image"][1]).all())
        True
    """

    def __init__(
        self,
        *,
        num_envs: int = 1,
        max_episode_steps: int = 24,
        seed: int = 0,
        action_dim: int = 2,
        state_dim: int = 4,
        image_size: int = 32,
        success_steps: int = 2,
        success_tol: float = 0.35,
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}; it must be >= 1")
        super().__init__(
            action_dim,
            state_dim,
            (3, image_size, image_size),
            success_steps=success_steps,
            success_tol=success_tol,
            batch_size=torch.Size([num_envs]),
            seed=seed,
        )
        self.max_episode_steps = max_episode_steps
        self.seed = seed
        self.skip_observation = False
        self._next_id = 0
        column = (num_envs, 1)
        self._init_state_id = torch.zeros(column, dtype=torch.int64)
        self._elapsed = torch.zeros(column, dtype=torch.int64)
        spec = self.observation_spec
        spec[keys.TASK_ID] = Unbounded(column, dtype=torch.int64)
        spec[keys.INIT_STATE_ID] = Unbounded(column, dtype=torch.int64)
        self.observation_spec = spec
        flag = Categorical(2, shape=column, dtype=torch.bool)
        self.done_spec = Composite(
            {key: flag.clone() for key in ("done", "terminated", "truncated")},
            shape=(num_envs,),
        )

    def _reset(
        self,
        tensordict: TensorDictBase | None = None,
        *,
        task_id: int | torch.Tensor = 0,
        init_state_id: int | torch.Tensor | None = None,
    ) -> TensorDict:
        column = self._elapsed.shape
        reset = None if tensordict is None else tensordict.get("_reset", None)
        reset = torch.ones(column, dtype=torch.bool) if reset is None else reset
        reset = reset.reshape(column)
        if init_state_id is None:
            init_state_id = self._next_id + torch.arange(column[0])
            self._next_id += column[0]
        init_state_id = torch.as_tensor(init_state_id).reshape(-1, 1).expand(column)
        self._check_start(torch.as_tensor(task_id), init_state_id[reset])
        self._init_state_id = init_state_id.where(reset, self._init_state_id)
        self._elapsed = self._elapsed.masked_fill(reset, 0)
        self._streak = self._streak.masked_fill(reset, 0)
        self._target = self._sample_targets()
        self.skip_observation = False
        out = self._obs(self._make_state(None))
        out["success"] = torch.zeros(column, dtype=torch.bool)
        return self._finish(out, out["success"])

    def _check_start(self, task_id: torch.Tensor, init_state_id: torch.Tensor) -> None:
        if (task_id != 0).any():
            raise ValueError(f"task_id is {task_id.tolist()}; the toy has task 0 only")
        if (init_state_id < 0).any():
            raise ValueError(f"init_state_id is {init_state_id.tolist()}; must be >= 0")

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        action = tensordict.get("action")
        if not torch.isfinite(action).all():
            raise ValueError(f"the action has values that are not finite: {action}")
        mask = tensordict.get("_step", None)
        mask = torch.ones_like(self._streak, dtype=torch.bool) if mask is None else mask
        mask = mask.reshape(self._streak.shape)
        self._elapsed = self._elapsed + mask
        out = super()._step(tensordict)
        out["reward"] = (out["success"] & mask).float()
        return self._finish(out, out["success"])

    def _finish(self, out: TensorDict, success: torch.Tensor) -> TensorDict:
        truncated = ~success & (self._elapsed >= self.max_episode_steps)
        out["terminated"] = success.clone()
        out["truncated"] = truncated
        out["done"] = success | truncated
        if self.skip_observation and out["done"].any():
            out[keys.IMAGE] = self._draw(out[keys.STATE])
        out[keys.TASK_ID] = torch.zeros_like(self._init_state_id)
        out[keys.INIT_STATE_ID] = self._init_state_id.clone()
        return out

    def _obs(self, state: torch.Tensor) -> TensorDict:
        if not self.skip_observation:
            self._image = self._draw(state)
        observation = {"image": self._image, "state": state}
        out = TensorDict({"observation": observation}, self.batch_size)
        # One shared value: a stack of N strings costs more than the physics.
        out[keys.INSTRUCTION] = NonTensorData(self.instruction, self.batch_size)
        return out

    def _draw(self, state: torch.Tensor) -> torch.Tensor:
        hand, target = state[:, :2], self._target[:, :2]
        place = torch.linspace(-1, 1, self.image_shape[-1])
        image = torch.full((len(state), *self.image_shape), 30, dtype=torch.uint8)
        for channel, center, radius in ((1, target, self.success_tol), (0, hand, 0.08)):
            near = (place - center.unsqueeze(-1)).abs() <= radius
            field = near[:, 1, :, None] & near[:, 0, None, :]
            image[:, channel].masked_fill_(field, 220)
        return image

    def _sample_targets(self) -> torch.Tensor:
        seeds = derive_seed(self.seed, "toy") + self._init_state_id.squeeze(-1)
        return uniform(seeds, self.action_dim) - 0.5
