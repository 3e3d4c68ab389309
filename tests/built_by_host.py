"""Stands for the file in which miles and slime build the model of a training actor: their two functions, by their names."""

from __future__ import annotations

from argparse import Namespace

from megatron_rl.testing.layout_step import LayoutModel


def setup_model_and_optimizer(args: Namespace, role: str = "actor"):
    built = LayoutModel(args.layout, 64, args.tiny)
    return built.models, built.optimizer, None


def initialize_model_and_optimizer(args: Namespace, role: str = "actor"):
    model, optimizer, schedule = setup_model_and_optimizer(args, role)
    return model, optimizer, schedule, -1
