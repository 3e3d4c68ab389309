"""The simulated device sees each planted wait, copy and mixture and nothing else, and leaves torch as it was."""

from __future__ import annotations

import pytest
import torch
from simulated_cuda import ASYNC_COPY, COMPILATION, COPY, LOOK, MIXTURE, CaptureError, mark, simulated_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/test_gpu.py asks it")


def on_device(values=(1.0, 0.0, 2.0, 0.0, 3.0)):
    """Marked directly, so that no copy is on the list."""
    return mark(torch.tensor(list(values)))


def mask():
    return mark(torch.tensor([True, False, True, False, True]))


def index():
    return torch.tensor([0, 1])


class Doubled(torch.autograd.Function):
    """Looks at its gradient: a wait that only backward has."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 if bool(gradient.sum() > 0) else gradient


def backward_that_looks():
    Doubled.apply(on_device().requires_grad_()).sum().backward()


def set_by_a_host_tensor():
    on_device()[0] = torch.tensor(3.0)


def assign_rows_of_the_host():
    on_device()[mark(index())] = torch.ones(2)


def multiply_in_place():
    torch.ones(5).mul_(on_device())


PLANTED = {
    "item": (LOOK, lambda: on_device().sum().item()),
    "float": (LOOK, lambda: float(on_device().sum())),
    "bool": (LOOK, lambda: bool((on_device() > 0).any())),
    "if": (LOOK, lambda: 1 if on_device().sum() > 0 else 0),
    "tolist": (LOOK, lambda: on_device().tolist()),
    "cpu": (LOOK, lambda: on_device().cpu()),
    "to the CPU": (LOOK, lambda: on_device().to("cpu")),
    "copied into a CPU tensor": (LOOK, lambda: torch.zeros(5).copy_(on_device())),
    "index by a mask": (LOOK, lambda: on_device()[mask()]),
    "written by a mask": (LOOK, lambda: on_device().index_put_((mask(),), mark(torch.ones(3)))),
    "nonzero": (LOOK, lambda: on_device().nonzero()),
    "where without values": (LOOK, lambda: torch.where(mask())),
    "unique": (LOOK, lambda: on_device().unique()),
    "masked_select": (LOOK, lambda: on_device().masked_select(mask())),
    "bincount": (LOOK, lambda: mark(index()).bincount()),
    "equal": (LOOK, lambda: torch.equal(on_device(), on_device())),
    "allclose": (LOOK, lambda: torch.allclose(on_device(), on_device())),
    "repeat_interleave by a tensor": (LOOK, lambda: torch.repeat_interleave(on_device(), mark(torch.ones(5, dtype=torch.int64)))),
    "synchronize": (LOOK, lambda: torch.cuda.synchronize()),
    "a stream's synchronize": (LOOK, lambda: torch.cuda.current_stream().synchronize()),
    "an event's synchronize": (LOOK, lambda: torch.cuda.Event().synchronize()),
    "in backward": (LOOK, backward_that_looks),
    "torch.tensor": (COPY, lambda: torch.tensor([1, 2], device="cuda")),
    "torch.tensor of a number": (COPY, lambda: torch.tensor(1, device="cuda")),
    "as_tensor of a number": (COPY, lambda: torch.as_tensor(1, device=torch.device("cuda", 0))),
    "as_tensor of a CPU tensor": (COPY, lambda: torch.as_tensor(index(), device="cuda")),
    "new_tensor": (COPY, lambda: on_device().new_tensor([1.0])),
    "to the device": (COPY, lambda: torch.ones(5).to("cuda")),
    "to the device by its number": (COPY, lambda: torch.ones(5).to(torch.cuda.current_device())),
    "to another tensor": (COPY, lambda: torch.ones(5).to(on_device())),
    "cuda": (COPY, lambda: torch.ones(5).cuda()),
    "copied from a CPU tensor": (COPY, lambda: on_device().copy_(torch.zeros(5))),
    "set by a 0-d CPU tensor": (COPY, set_by_a_host_tensor),
    "index by a CPU tensor": (COPY, lambda: on_device()[index()]),
    "index by a CPU mask": (COPY, lambda: on_device()[torch.ones(5, dtype=torch.bool)]),
    "sum of both": (MIXTURE, lambda: on_device() + torch.ones(5)),
    "in place": (MIXTURE, multiply_in_place),
    "a device's number beside a CPU tensor": (MIXTURE, lambda: on_device().sum() * torch.ones(5)),
    "cat": (MIXTURE, lambda: torch.cat([on_device(), torch.ones(5)])),
    "stack of numbers": (MIXTURE, lambda: torch.stack([on_device().sum(), torch.tensor(1.0)])),
    "gather": (MIXTURE, lambda: on_device().gather(0, index())),
    "where": (MIXTURE, lambda: torch.where(torch.ones(5, dtype=torch.bool), on_device(), 0.0)),
    "index of a CPU tensor": (MIXTURE, lambda: torch.ones(5)[mark(index())]),
    "rows of the host assigned": (MIXTURE, assign_rows_of_the_host),
    "numpy": (MIXTURE, lambda: on_device().numpy()),
}


def write_numbers():
    x = on_device()
    x[0], x[1:3], x[mask()] = 3, 4.0, 5.0


def gradient_on_the_device():
    leaf = (on_device() * 1).requires_grad_()
    (leaf[mark(index())] * 3).sum().backward()
    assert leaf.grad.is_cuda and leaf.grad.device == leaf.device == torch.device("cuda", 0)


HARMLESS = {
    "made by a kernel": lambda: [torch.zeros(2, device="cuda"), torch.arange(3, device=0), torch.full((), 2, device="cuda:0")],
    "like another": lambda: torch.full_like(on_device(), 2).new_zeros(3) + on_device()[:3],
    "a copy that nobody waits for": lambda: torch.ones(5).to("cuda", non_blocking=True) + on_device(),
    "another dtype": lambda: on_device().to(torch.bfloat16).float().to(device="cuda", dtype=torch.float64),
    "already there": lambda: on_device().to("cuda").cuda(),
    "numbers": lambda: on_device() * 2 + torch.tensor(1.0),
    "where": lambda: torch.where(mask(), on_device(), -torch.inf),
    "where of two numbers": lambda: torch.where(mask(), 1.0, float("nan")),
    "index by the device's": lambda: on_device()[mark(index())],
    "slices": lambda: on_device()[1:3][None].expand(2, 2).reshape(4),
    "written numbers": write_numbers,
    "masked_fill": lambda: on_device().masked_fill_(mask(), 0.0),
    "repeat_interleave of a known size": lambda: torch.repeat_interleave(
        on_device(), mark(torch.ones(5, dtype=torch.int64)), output_size=5
    ),
    "reductions": lambda: [on_device().max(), on_device().argmax(), on_device().cumsum(0), on_device().isfinite().all()],
    "a gradient": gradient_on_the_device,
    "the host's own": lambda: [torch.ones(5).nonzero(), torch.ones(5).tolist(), torch.ones(5)[torch.ones(5) > 0].sum().item()],
}


@pytest.mark.parametrize("name", PLANTED)
def test_each_planted_wait_copy_and_mixture_is_seen_once(name):
    kind, run = PLANTED[name]
    with simulated_cuda() as seen:
        run()
    assert [event.kind for event in seen] == [kind], seen


@pytest.mark.parametrize("name", HARMLESS)
def test_what_costs_no_wait_stays_silent(name):
    with simulated_cuda() as seen:
        HARMLESS[name]()
    assert seen == []


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        (LOOK, lambda: on_device().sum().item()),
        (COPY, lambda: torch.ones(5).to("cuda")),
        (ASYNC_COPY, lambda: torch.ones(5).to("cuda", non_blocking=True)),
        (ASYNC_COPY, lambda: on_device().copy_(torch.ones(5), non_blocking=True)),
    ],
    ids=["a look", "a copy", "a copy to the device", "a copy from the host"],
)
def test_a_capture_refuses_what_a_graph_cannot_hold(kind, run):
    with simulated_cuda() as seen:
        with pytest.raises(CaptureError, match=kind), seen.capture():
            assert torch.cuda.is_current_stream_capturing()
            run()
        assert not torch.cuda.is_current_stream_capturing()
        with seen.capture():
            HARMLESS["reductions"]()


def test_a_capture_refuses_a_kernel_without_a_binary():
    """Another constant or another dtype is another binary; a kernel that ran with both is there."""
    with simulated_cuda() as seen:
        x = on_device()
        seen.launch("some_kernel", (x, 5), {"BLOCK": 16})
        with seen.capture():
            seen.launch("some_kernel", (x * 2, 5), {"BLOCK": 16})
            for arguments, options in (((x, 5), {"BLOCK": 32}), ((x.double(), 5), {"BLOCK": 16}), ((None, 5), {"BLOCK": 16})):
                with pytest.raises(CaptureError, match=COMPILATION):
                    seen.launch("some_kernel", arguments, options)


def torch_as_it_is() -> dict:
    owners = (torch, torch.Tensor, torch.cuda, torch.cuda.random)
    return {(owner.__name__, name): value for owner in owners for name, value in vars(owner).items()}


@pytest.mark.parametrize("error", [None, ValueError("stop")], ids=["at its end", "after an exception"])
def test_torch_is_left_as_it_was(error):
    before = torch_as_it_is()
    try:
        with simulated_cuda():
            x = torch.ones(3, device="cuda")
            if error:
                raise error
    except ValueError:
        pass
    after = torch_as_it_is()
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert not x.is_cuda and not torch.cuda.is_available() and x.tolist() == [1.0, 1.0, 1.0]
