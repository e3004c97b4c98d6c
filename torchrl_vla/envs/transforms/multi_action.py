"""Play a chunk of actions as one decision of the environment."""

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Bounded, Composite
from torchrl.envs import EnvBase, TransformedEnv
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.envs.transforms import Transform

from torchrl_vla.data import keys


class MultiAction(Transform):
    """Execute the ``H`` actions of a chunk, until the episode ends.

    One step of the transformed environment is one decision: ``("next", "reward")`` is
    the **sum** of the rewards of the env steps played, ``("next", "num_executed")``
    their number, and everything else under ``"next"`` what the last step returned.
    Success in the middle of a chunk keeps its reward, ends the episode, and no later
    action is played. In a batch of environments each member stops by itself; the others
    go on.

    An environment that has an attribute ``skip_observation`` is told with it, before
    each inner step, that nobody will look at the observation (it renders nonetheless
    when a step ends the episode). Put transforms that work on observations *after*
    MultiAction, so that they run once per decision; transforms *before* it run once per
    env step.

    ``torchrl.envs.transforms.MultiAction(stack_rewards=False)`` returns the last reward
    only, has no count, and skips the transforms behind it when an episode ends early.

    Args:
        num_actions: ``H``, actions per chunk.
        chunk_key: where the policy's chunk is, ``[H, A]`` per member.
        action_key: what the environment reads, ``[A]`` per member.
        num_executed_key: where the count goes, under ``"next"``.

    Keys read: ``chunk_key`` float32 ``[*B, H, A]``; an optional ``"_step"`` mask leaves
    members out. Keys written under ``"next"``: the reward's sum, ``num_executed`` int64
    ``[*B, 1]`` in 0..H.

    Raises:
        ValueError: for ``num_actions < 1``, or a chunk that has another shape or values
            that are not finite, before anything is stepped.
        KeyError: when there is no chunk.

    Example:
        >>> import torch
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl.envs.custom import ToyVLAEnv
        >>> env = TransformedEnv(
        ...     ToyVLAEnv(action_dim=2, state_dim=4, success_steps=2, seed=0),
        ...     MultiAction(num_actions=4),
        ... )
        >>> td = env.reset()
        >>> target = td["observation", "state"][2:4]
        >>> td["vla_action", "chunk"] = target.expand(4, 2)
        >>> td = env.step(td)
        >>> bool(td["next", "success"]), int(td["next", "num_executed"])
        (True, 2)
    """

    def __init__(
        self,
        num_actions: int,
        *,
        chunk_key: NestedKey = keys.CHUNK,
        action_key: NestedKey = keys.ACTION,
        num_executed_key: NestedKey = "num_executed",
    ) -> None:
        if num_actions < 1:
            raise ValueError(f"num_actions is {num_actions}; it must be >= 1")
        super().__init__(in_keys_inv=[action_key], out_keys_inv=[chunk_key])
        self.num_actions = num_actions
        self.chunk_key = chunk_key
        self.action_key = action_key
        self.num_executed_key = num_executed_key

    # The first action is played by the step that is under way, the others by stepping
    # the parent from within it. So the transforms behind this one see one step, whose
    # "next" is the end of the chunk, however early that came.

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        chunk_BHA = tensordict.get(self.chunk_key, None)
        if chunk_BHA is None:
            raise KeyError(
                f"MultiAction reads a chunk from {self.chunk_key!r}; there is none "
                f"among {sorted(map(str, tensordict.keys(True, True)))}. Write it "
                "there, or pass chunk_key."
            )
        action_spec = self.parent.full_action_spec[self.action_key]
        expected = (*tensordict.shape, self.num_actions, action_spec.shape[-1])
        if chunk_BHA.shape != expected:
            raise ValueError(
                f"the chunk at {self.chunk_key!r} has shape {tuple(chunk_BHA.shape)}; "
                f"expected is [*batch, num_actions, action_dim] = {expected}"
            )
        self._check_finite(chunk_BHA, tensordict.get("_step", None))
        # The chunk rides along under a private name: the action may overwrite it.
        tensordict.set("_chunk", chunk_BHA)
        tensordict.set(self.action_key, chunk_BHA.select(tensordict.ndim, 0))
        self._skip_observation(self.num_actions > 1)
        return tensordict

    def _check_finite(
        self, chunk_BHA: torch.Tensor, playing: torch.Tensor | None
    ) -> None:
        finite_B = chunk_BHA.isfinite().all(-1).all(-1)
        if playing is not None:
            finite_B = finite_B | ~playing.reshape(finite_B.shape)
        if not finite_B.all():
            raise ValueError(
                f"the chunk at {self.chunk_key!r} has values that are not finite (of "
                f"members {(~finite_B).nonzero().tolist()}); look at the policy's "
                "logits and the action statistics. Nothing was stepped."
            )

    def _step(
        self, tensordict: TensorDictBase, next_tensordict: TensorDictBase
    ) -> TensorDictBase:
        parent, final = self.parent, next_tensordict
        batch_ndim = tensordict.ndim
        playing = tensordict.get("_step", None)
        if playing is None:
            playing = torch.ones(final.shape, dtype=torch.bool, device=final.device)
        playing = playing.reshape(final.shape)
        executed = playing.unsqueeze(-1).to(torch.int64)
        rewards = {
            key: final.get(key) * _expand(playing, final.get(key))
            for key in parent.reward_keys
        }

        chunk_BHA = tensordict.get("_chunk")
        previous = tensordict.exclude("_chunk", "_step")
        for h in range(1, self.num_actions):
            playing = playing & ~_is_done(parent, final)
            if not playing.any():
                break
            self._skip_observation(h < self.num_actions - 1)
            previous = parent.step_mdp(previous.set("next", final))
            previous.set(self.action_key, chunk_BHA.select(batch_ndim, h))
            if not playing.all():
                previous.set("_step", playing)
            played = parent.step(previous).get("next")
            for key, total in rewards.items():
                total += played.get(key) * _expand(playing, total)
            executed += playing.unsqueeze(-1)
            final = _merge(playing, played, final)

        self._skip_observation(False)
        final.update(rewards)
        return final.set(self.num_executed_key, executed)

    def _skip_observation(self, skip: bool) -> None:
        env = self.parent
        while isinstance(env, TransformedEnv):
            env = env.base_env
        # A batched environment would forward the question to its workers.
        if not isinstance(env, BatchedEnvBase) and hasattr(env, "skip_observation"):
            env.skip_observation = skip

    def _reset(
        self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase
    ) -> TensorDictBase:
        count = torch.zeros(
            *tensordict_reset.shape,
            1,
            dtype=torch.int64,
            device=tensordict_reset.device,
        )
        return tensordict_reset.set(self.num_executed_key, count)

    def transform_input_spec(self, input_spec: Composite) -> Composite:
        action_spec = input_spec["full_action_spec"]
        batch_ndim = len(input_spec.shape)
        one = action_spec[self.action_key]
        shape = (*one.shape[:batch_ndim], self.num_actions, *one.shape[batch_ndim:])
        chunk = one.unsqueeze(batch_ndim).expand(shape).clone()
        if self.chunk_key != self.action_key:
            del action_spec[self.action_key]
        action_spec[self.chunk_key] = chunk
        return input_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        observation_spec[self.num_executed_key] = Bounded(
            0,
            self.num_actions,
            shape=(*observation_spec.shape, 1),
            dtype=torch.int64,
            device=observation_spec.device,
        )
        return observation_spec


def _is_done(env: EnvBase, next_tensordict: TensorDictBase) -> torch.Tensor:
    """Whether each member's episode has ended, bool ``[*B]``."""
    flags = [next_tensordict.get(key).squeeze(-1) for key in env.done_keys]
    return torch.stack(flags).any(0)


def _expand(mask: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return mask.reshape(*mask.shape, *(1,) * (like.ndim - mask.ndim))


def _merge(
    mask: torch.Tensor, new: TensorDictBase, old: TensorDictBase
) -> TensorDictBase:
    """``new`` for the members in ``mask``, ``old`` for the others."""
    if mask.all():
        return new
    merged = old.clone()
    merged[mask] = new[mask]
    return merged
