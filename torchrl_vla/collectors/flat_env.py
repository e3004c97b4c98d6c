"""Any TorchRL environment as a flat batch of slots, reset and stepped by mask."""

from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase

from torchrl_vla.data import keys


class FlatEnv:
    """Slots of an environment that plays a chunk per step.

    Args:
        env: it takes ``task_id`` and ``init_state_id`` at ``reset``. Batch sizes are
            ``[]``, ``[N]``, and for a ``ParallelEnv`` or ``SerialEnv`` ``[W]`` or
            ``[W, G]`` (:class:`LiberoWorkers` steps single members by mask).

    Attributes:
        num_workers: W, or 1 for an environment in this process.
        num_members: slots of each.
        observation: last one of all slots, ``[S]``; ``None`` before the first reset.

    Raises:
        ValueError: for another batch size.
    """

    def __init__(self, env: EnvBase) -> None:
        self.env = env
        base = env
        while isinstance(base, TransformedEnv):
            base = base.base_env
        self.base = base
        self._has_workers = isinstance(base, BatchedEnvBase)
        if env.batch_dims > 1 + self._has_workers:
            raise ValueError(
                f"the environment has batch size {tuple(env.batch_size)}; supported "
                "are [], [N], and with workers [W] and [W, G]"
            )
        self.num_slots = max(env.numel(), 1)
        self.num_workers = env.batch_size[0] if self._has_workers else 1
        self.num_members = self.num_slots // self.num_workers
        self.observation: TensorDictBase | None = None

    def reset(self, mask: Tensor, task_id: Tensor, init_state_id: Tensor):
        """Reset the slots in ``mask``; the observations of all slots.

        Args:
            mask: bool ``[S]``. In the first reset all are reset, the others to the
                start of the first, since TorchRL needs a complete one.
            task_id, init_state_id: int64 ``[S, 1]``.
        """
        start = {keys.TASK_ID: task_id, keys.INIT_STATE_ID: init_state_id}
        if self.observation is None:
            first = int(mask.nonzero()[0])
            same = {k: v[first].expand_as(v) for k, v in start.items()}
            start = {k: v.where(mask.unsqueeze(-1), same[k]) for k, v in start.items()}
            request = TensorDict({}, batch_size=[self.num_slots])
        else:
            request = self.observation.clone(False)
            request["_reset"] = mask.unsqueeze(-1)
        after = self.env.reset(self._shaped(request), **self._arguments(start))
        self.observation = after.reshape(self.num_slots)
        return self.observation

    def step(self, mask: Tensor, tokens: Tensor) -> TensorDictBase:
        """Play a chunk in the slots in ``mask``; what follows for all slots.

        Args:
            mask: bool ``[S]``.
            tokens: int64 ``[number in mask, H, A]``.
        """
        request = self.observation.clone(False)
        all_tokens = tokens.new_zeros(self.num_slots, *tokens.shape[1:])
        all_tokens[mask] = tokens
        request[keys.TOKENS] = all_tokens.to(self.env.device)
        if not mask.all():
            request["_step"] = mask
        after = self.env.step(self._shaped(request))["next"].reshape(self.num_slots)
        self.observation = after.exclude("reward")
        return after

    def _shaped(self, request: TensorDictBase) -> TensorDictBase:
        if not self.env.batch_dims:
            return request.squeeze(0)
        return request.reshape(self.env.batch_size)

    def _arguments(self, start: dict[str, Tensor]) -> dict:
        if not self._has_workers:
            return start
        each = zip(*(v.split(self.num_members) for v in start.values()), strict=True)
        return {"list_of_kwargs": [dict(zip(start, v, strict=True)) for v in each]}
