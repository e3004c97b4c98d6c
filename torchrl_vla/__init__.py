"""Reinforcement fine-tuning of vision-language-action policies with TorchRL."""
