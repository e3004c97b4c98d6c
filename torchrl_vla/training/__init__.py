"""Updating, evaluating, saving and reporting."""

from torchrl_vla.training.evaluator import EvaluationResult, Evaluator
from torchrl_vla.training.updater import Updater

__all__ = ["EvaluationResult", "Evaluator", "Updater"]
