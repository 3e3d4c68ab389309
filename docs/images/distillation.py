"""Draws distillation.png: the forward KL of a teacher's top K with and without the tail, over the policy's mass in K.

python docs/images/distillation.py    # seconds on a CPU; prints the numbers that it draws

One row of 1,000 ids. The policy is too sharp inside K, and has a flat tail: no point of the line is the teacher.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from megatron_rl import DistillationSettings, LogitsTeacher, TopKTeacher
from megatron_rl.policy_loss import policy_loss

VOCABULARY, K = 1000, 8
MASSES = torch.linspace(0.05, 0.98, 187, dtype=torch.float64)
TEACHER = torch.arange(1, VOCABULARY + 1, dtype=torch.float64) ** -1.2
TEACHER /= TEACHER.sum()
COLORS = {"top K alone": "#dc2626", "top K and tail": "#2563eb", "all ids": "#6b7280"}


def policies() -> Tensor:  # [masses, V] log-probabilities
    inside, outside = TEACHER[:K] ** 2, torch.ones(VOCABULARY - K, dtype=torch.float64)
    parts = (MASSES[:, None] * inside / inside.sum(), (1 - MASSES)[:, None] * outside / outside.sum())
    return torch.cat(parts, 1).log()


def ours(teacher: TopKTeacher | LogitsTeacher) -> tuple[Tensor, Tensor]:  # [masses] value, length of the gradient
    leaf, size = policies().requires_grad_(), len(MASSES)
    rows = (torch.zeros(size, dtype=torch.int64), None, torch.zeros(size), torch.ones(size, dtype=torch.bool))
    terms = {"distillation": DistillationSettings(divergence="forward_kl"), "teacher": teacher}
    output = policy_loss("reinforce", leaf, *rows, torch.arange(size + 1, dtype=torch.int32), torch.ones(size), **terms)
    (gradient,) = torch.autograd.grad(output.loss, leaf)
    assert output.divergences is not None
    return output.divergences, gradient.norm(dim=1)


def truncated() -> tuple[Tensor, Tensor]:
    """The sum over K, and the length of its gradient after a clamp at 0."""
    leaf, q = policies().requires_grad_(), TEACHER[:K]
    value = (q * (q.log() - leaf.log_softmax(-1)[:, :K])).sum(-1)
    (gradient,) = torch.autograd.grad(value.clamp(min=0).sum(), leaf)
    return value.detach(), gradient.norm(dim=1)


def share_without_gradient(k: int) -> float:
    """Of 2,000 random rows, whose policy is 0.04 nats from its teacher, those that a clamp of the sum over K stops."""
    generator = torch.Generator().manual_seed(1)
    teacher, noise = (torch.randn(2000, VOCABULARY, generator=generator, dtype=torch.float64) for _ in range(2))
    log_q, log_p = (3 * teacher).log_softmax(-1), (3 * teacher + 0.3 * noise).log_softmax(-1)
    top = log_q.topk(k)
    values = (top.values.exp() * (top.values - log_p.gather(1, top.indices))).sum(-1)
    return float((values <= 0).double().mean())


def main() -> Path:
    ids = torch.arange(K).expand(len(MASSES), -1)
    log_q = TEACHER.log().expand(len(MASSES), -1)
    lines = dict(zip(COLORS, (truncated(), ours(TopKTeacher(ids, log_q[:, :K])), ours(LogitsTeacher(log_q))), strict=True))
    mass = float(TEACHER[:K].sum())
    figure = Figure(figsize=(6.8, 3.1), dpi=140)  # few inches, so that text stays legible on a narrow screen
    canvas = FigureCanvasAgg(figure)
    print(f"the teacher has {mass:.3f} of its mass in K")
    print(*(f"random rows without a gradient, K = {k}: {share_without_gradient(k):.1%}" for k in (8, 32)), sep="\n")
    for number, axis in enumerate(figure.subplots(1, 2)):
        for name, found in lines.items():
            axis.plot(MASSES, found[number], color=COLORS[name], linewidth=1.8, label=name)
        axis.axvline(mass, color="#9ca3af", linewidth=0.8, linestyle="--")
        axis.axhline(0, color="#9ca3af", linewidth=0.6)
        axis.set_title(("forward KL, nats", "length of the gradient (red: of a clamp at 0)")[number], fontsize=8.5)
        axis.set_xlabel("the policy's mass in K (dashed: the teacher's)", fontsize=8)
        axis.tick_params(labelsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    first = int((lines["top K alone"][0] <= 0).nonzero()[0])
    for name, (value, length) in lines.items():
        print(
            f"{name}: {value[first]:.3f} nats, gradient {length[first]:.3f} at mass {MASSES[first]:.3f}; at the end {value[-1]:.3f}"
        )
    figure.axes[0].set_ylim(-0.35, 2.0)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, loc="lower center", ncols=3)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    canvas.draw()
    path = Path(__file__).with_suffix(".png")
    size = canvas.get_width_height()
    Image.frombuffer("RGBA", size, canvas.buffer_rgba()).convert("RGB").quantize(32).save(path, optimize=True)
    return path


if __name__ == "__main__":
    main()
