"""Instructions to token ids, exactly as the policy was trained on them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

TEMPLATE = "In: What action should the robot take to {instruction}?\nOut:"
BOS_ID = 1
EMPTY_ID = 29871
"""LLaMA-2's lone space, which the training data has between prompt and actions."""
PAD_ID = 32000
_CACHE_SIZE = 4096


class PromptEncoder:
    """The prompt template, LLaMA-2's tokenizer and the rule of token 29871.

    ``[1] + tokens(template(lower(instruction))) + [29871]``; a prompt that ends in
    29871 already gets no second one.

    Source: openvla-oft at 213c5ff8 and SimpleVLA-RL at 7c51662d.

    Args:
        tokenizer: the folder's ``tokenizer.json``; BOS is added if it does not do so.

    Example:
        >>> from torchrl_vla.modules.openvla_oft.tiny import tiny_tokenizer
        >>> encoder = PromptEncoder(tiny_tokenizer())
        >>> ids, mask = encoder(["go", "pick up the bowl"])
        >>> ids[0, 0].item(), ids[1, -1].item(), mask[0].sum().item() < len(ids[1])
        (1, 29871, True)
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "PromptEncoder":
        """From ``tokenizer.json`` of a checkpoint folder.

        Raises:
            FileNotFoundError: when the folder has none.
            ValueError: when it cannot be parsed.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{path} is missing; expected is the fast tokenizer of the checkpoint "
                "(from the folder it was fine-tuned from, or converted from "
                "tokenizer.model with transformers)"
            )
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:  # tokenizers raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from error

    def encode(self, instruction: str) -> list[int]:
        """Token ids of one instruction, from BOS to 29871.

        Raises:
            TypeError: when it is not text.
            ValueError: when it is empty.
        """
        if not isinstance(instruction, str):
            raise TypeError(
                f"the instruction is {instruction!r} ({type(instruction).__name__}); "
                "expected is text"
            )
        if not instruction.strip():
            raise ValueError(
                "the instruction is empty; OpenVLA-OFT needs a task description, such "
                "as 'turn on the stove'"
            )
        if instruction not in self._cache:
            if len(self._cache) >= _CACHE_SIZE:
                self._cache.clear()
            text = TEMPLATE.format(instruction=instruction.lower())
            self._cache[instruction] = self._tokenize(text)
        return self._cache[instruction]

    def __call__(
        self, instructions: Sequence[str], *, padding_side: str = "right"
    ) -> tuple[Tensor, Tensor]:
        """A padded batch.

        Args:
            instructions: ``B`` texts.
            padding_side: ``right`` or ``left``; the model takes both.

        Returns:
            ``input_ids`` and ``attention_mask``, int64 ``[B, L]`` on the CPU.

        Raises:
            TypeError, ValueError: see :meth:`encode`.
        """
        if padding_side not in ("left", "right"):
            raise ValueError(
                f"padding_side is {padding_side!r}; allowed are 'left' and 'right'"
            )
        rows = [self.encode(text) for text in instructions]
        length = max(map(len, rows), default=0)
        input_ids = torch.full((len(rows), length), PAD_ID)
        mask = torch.zeros_like(input_ids)
        for i, row in enumerate(rows):
            start = length - len(row) if padding_side == "left" else 0
            input_ids[i, start : start + len(row)] = torch.tensor(row)
            mask[i, start : start + len(row)] = 1
        return input_ids, mask

    def _tokenize(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text).ids
        if ids[:1] != [BOS_ID]:
            ids = [BOS_ID, *ids]
        return ids if ids[-1] == EMPTY_ID else [*ids, EMPTY_ID]
