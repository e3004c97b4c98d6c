"""Give an environment that plays chunks the token interface of a policy."""

import torch
from tensordict.utils import NestedKey
from torchrl.envs.transforms import ActionTokenizerTransform

from torchrl_vla.data import keys
from torchrl_vla.data.action_codec import ActionCodec


class ActionTokensTransform(ActionTokenizerTransform):
    """Decode action tokens to a chunk on the way into the environment.

    The environment advertises a ``Categorical`` spec with ``codec.num_bins`` ids in
    place of the chunk. On a replay buffer the forward direction encodes the chunks of
    demonstrations to training targets, with the same bins.

    Put it behind :class:`MultiAction`. TorchRL's ``ActionTokenizerTransform``, which
    this is, defaults to one action per step and passes on the tokenizer's dtype; here
    the float64 of the codec becomes the float32 of the schema.

    Args:
        codec: what the ids mean.
        chunk_key: where the decoded chunk goes.
        tokens_key: where the policy writes its tokens.

    Keys read: ``tokens_key`` int64 ``[H, A]`` in ``[0, num_bins)``. Written, for the
    environment only: ``chunk_key`` float32 ``[H, A]`` in env units.

    Raises:
        ValueError: for tokens outside the window.
        KeyError: when the tokens are missing.

    Example:
        >>> from torchrl.envs import TransformedEnv
        >>> from torchrl.envs.custom import ToyVLAEnv
        >>> from torchrl_vla.data.action_codec import UniformActionCodec
        >>> from torchrl_vla.envs.transforms import MultiAction
        >>> env = TransformedEnv(ToyVLAEnv(action_dim=2), MultiAction(num_actions=3))
        >>> env = env.append_transform(ActionTokensTransform(UniformActionCodec(5)))
        >>> tuple(env.full_action_spec["vla_action", "tokens"].shape)
        (3, 2)
        >>> td = env.reset().set(("vla_action", "tokens"), torch.full((3, 2), 4))
        >>> env.step(td)["next", "observation", "state"][:2].tolist()
        [0.800000011920929, 0.800000011920929]
    """

    def __init__(
        self,
        codec: ActionCodec,
        *,
        chunk_key: NestedKey = keys.CHUNK,
        tokens_key: NestedKey = keys.TOKENS,
    ) -> None:
        super().__init__(codec, in_key=chunk_key, out_key=tokens_key)

    def _inv_apply_transform(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokenizer.decode(tokens).to(torch.float32)
