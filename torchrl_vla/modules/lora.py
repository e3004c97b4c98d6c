"""Low-rank adapters on attention projections, with peft."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

LLAMA_ATTENTION = r".*language_model\.model\.layers\.\d+\.self_attn\.[qkvo]_proj"
"""Query, key, value and output projections of the language model."""
FILE = "adapter_model.safetensors"


def add_lora(
    model: nn.Module,
    *,
    rank: int = 32,
    alpha: float | None = None,
    dropout: float = 0.0,
    target: str = LLAMA_ATTENTION,
    seed: int = 0,
) -> nn.Module:
    """Attach adapters in place and freeze everything else.

    ``W x`` becomes ``W x + (alpha / rank) B A x`` with ``B = 0`` at first, so the model
    computes what it did before. Adapters are float32 whatever the model is: in bfloat16
    the steps of a small learning rate would round to nothing.

    Source: Hu et al. (arXiv:2106.09685), as implemented in peft. Unlike
    ``peft.get_peft_model`` the model is not wrapped: names, type and methods stay.

    Args:
        model: with linear layers that match ``target``.
        rank: ``r``, rows of ``A``.
        alpha: scale; ``None`` is ``rank``, so that the factor is 1.
        dropout: on the input of ``A``, while training. Keep it 0 for reinforcement
            learning: the ratio compares two forward passes.
        target: regular expression for whole module names.
        seed: of the initial ``A``.

    Returns:
        ``model``.

    Raises:
        ModuleNotFoundError: without peft.
        ValueError: for a rank below 1, no matching module, or a second call.

    Example:
        >>> from torchrl_vla.modules.openvla_oft import OpenVLAOFT, tiny_config
        >>> model = add_lora(OpenVLAOFT(tiny_config()), rank=4)
        >>> sum(p.numel() for p in model.parameters() if p.requires_grad)
        3072
    """
    if rank < 1:
        raise ValueError(f"rank is {rank}; it must be >= 1")
    if has_lora(model):
        raise ValueError("the model carries LoRA adapters already; merge_lora it first")
    peft = _import_peft()
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=target,
    )
    # torch.manual_seed would reseed every GPU as well, and fork_rng restores the CPU.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
        parameter.requires_grad_("lora_" in name)
    return model


def has_lora(model: nn.Module) -> bool:
    """Whether adapters are attached."""
    return any("lora_" in name for name, _ in model.named_parameters())


@contextmanager
def lora_disabled(model: nn.Module) -> Iterator[nn.Module]:
    """Inside, the model is the one before :func:`add_lora`: the reference of a KL.

    Raises:
        ValueError: when there are no adapters.

    Example:
        >>> model = add_lora(nn.Sequential(nn.Linear(2, 2)), rank=1, target="0")
        >>> with lora_disabled(model) as reference:
        ...     reference(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """
    layers = _lora_layers(model)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield model
    finally:
        # peft freezes the adapters it switches off, and thaws them again here.
        for layer in layers:
            layer.enable_adapters(True)


def merge_lora(model: nn.Module) -> nn.Module:
    """Add the adapters to the weights, in place, and remove them: for export.

    All parameters are trainable afterwards.

    Raises:
        ValueError: when there are no adapters.
    """
    layers = set(_lora_layers(model))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in layers:
                child.merge(safe_merge=True)
                setattr(parent, name, child.get_base_layer())
    return model.requires_grad_(True)


def lora_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The adapters alone, by parameter name: what a checkpoint of a LoRA run holds."""
    return {k: v for k, v in model.state_dict().items() if "lora_" in k}


def load_lora_state_dict(model: nn.Module, state: dict[str, torch.Tensor]) -> None:
    """Put adapters back, after :func:`add_lora` with the same arguments.

    Raises:
        ValueError: when names or shapes differ.
    """
    own = lora_state_dict(model)
    given = {k: tuple(v.shape) for k, v in state.items()}
    expected = {k: tuple(v.shape) for k, v in own.items()}
    if given != expected:
        different = sorted(set(given.items()) ^ set(expected.items()))[:4]
        raise ValueError(
            f"the adapters do not fit the model's, for example {different}; call "
            "add_lora with the rank and target they were trained with"
        )
    model.load_state_dict(state, strict=False)


def save_lora(model: nn.Module, folder: str | Path) -> None:
    """Write the adapters to ``adapter_model.safetensors`` of a folder.

    Raises:
        ValueError: when there are no adapters.
    """
    _lora_layers(model)
    Path(folder).mkdir(parents=True, exist_ok=True)
    state = {k: v.contiguous().cpu() for k, v in lora_state_dict(model).items()}
    save_file(state, Path(folder) / FILE)


def load_lora(model: nn.Module, folder: str | Path) -> None:
    """Read what :func:`save_lora` wrote, into a model with fitting adapters.

    Raises:
        FileNotFoundError, ValueError: when there is no such file or it does not fit.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    load_lora_state_dict(model, load_file(path))


def _lora_layers(model: nn.Module) -> list[nn.Module]:
    layer_type = _import_peft().tuners.lora.LoraLayer
    layers = [m for m in model.modules() if isinstance(m, layer_type)]
    if not layers:
        raise ValueError("the model has no LoRA adapters; call add_lora first")
    return layers


def _import_peft():
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "LoRA needs peft: pip install 'torchrl-vla[openvla]'"
        ) from error
    return peft
