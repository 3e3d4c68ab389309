"""The product of a head whose epilogue leaves e^z: alone, and in the fused head.

Interpreted on a CPU, compiled on a GPU. Its machine code: tests/test_kernel_code.py.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import trainer_cases
from helpers import KERNEL_DEVICE
from launches import counted_launches
from linear_cases import HeadBatch, budget, every_term, head_batch, on_device, run, worst_error
from test_linear_losses import KINDS, fused, options_of

import megatron_rl.ops.scaled_exp_triton as scaled_exp_triton
from megatron_rl.config import PolicyLossConfig
from megatron_rl.errors import ConfigError, DataError
from megatron_rl.layout.groups import SINGLE
from megatron_rl.ops import linear_head
from megatron_rl.ops.linear_log_probs import linear_log_probs
from megatron_rl.ops.log_probs import vocab_shard
from megatron_rl.ops.scaled_exp_triton import TileConfiguration, scaled_exp
from megatron_rl.testing.ranks import run_ranks

pytestmark = pytest.mark.kernel
SMALL = TileConfiguration(16, 32, 16, halves=True, group=2, num_warps=1, num_stages=1)
WIDTH, REAL, TEMPERATURE = 88, 77, 0.7
# Of a gradient. float32: sums of 77 exponentials in another order, z of a size of 20. bfloat16: e^z has 8 bits; the interpreter
# truncates. Products of float32 that add up in torch's order on a CPU are off by up to 2e-6 over a hundred seeds of `operands`, the
# log-probabilities by 7e-6 and the entropies by 1e-5: 40 products of float32 make a logit, and z is up to 45 in base 2. A GPU has
# another order, and exponentials good to 2^-22: twice that.
ON_GPU = KERNEL_DEVICE == "cuda"
TOLERANCES = {torch.float32: 4e-6 if ON_GPU else 2e-6, torch.bfloat16: 2**-7}
LOG_PROBS, ENTROPY = (1.5e-5, 2e-5) if ON_GPU else (5e-6, 1e-5)


def operands(dtype: torch.dtype, rows: int, hidden_size: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, hidden_size, generator=generator).mul(0.5).to(dtype)
    weight = torch.randn(WIDTH, hidden_size, generator=generator).to(dtype)
    labels = torch.randint(0, REAL, (rows,), generator=generator)
    return hidden.to(KERNEL_DEVICE), weight.to(KERNEL_DEVICE), labels.to(KERNEL_DEVICE)


def truth(hidden, weight, labels):
    """log_probs [n], entropy [n] and G [n, REAL] in float64."""
    logits = (hidden.double() @ weight.double().T)[:, :REAL] / TEMPERATURE
    log_p = logits.log_softmax(-1)
    delta = torch.nn.functional.one_hot(labels, REAL)
    entropy = -(log_p * log_p.exp()).sum(-1)
    return log_p.gather(1, labels[:, None])[:, 0], entropy, (delta - log_p.exp()) / TEMPERATURE


def leave(hidden, weight, labels, *, with_entropy=True, rounds_logits=False):
    out = torch.full((len(labels), WIDTH), math.nan, dtype=hidden.dtype, device=hidden.device)
    shard = vocab_shard(WIDTH, TEMPERATURE, REAL, SINGLE)
    result, scales = scaled_exp(hidden, weight, labels, shard, with_entropy=with_entropy, rounds_logits=rounds_logits, out=out)
    return result, out.double() * scales[:, None].double()


def tensor_map_faults(address: int, shape, strides, block, itemsize: int) -> list[str]:
    """What cuTensorMapEncodeTiled refuses of a matrix in rows, for a launch that the interpreter runs whatever the driver says."""
    row, pitch = block[1] * itemsize, strides[0] * itemsize
    return [
        *(f"address {address} is not a multiple of 16" for _ in range(address % 16 != 0)),
        *(f"a size of {size}" for size in shape if not 1 <= size <= 2**32),
        *(f"rows {pitch} bytes apart" for _ in range(pitch % 16 != 0 or pitch >= 2**40)),
        *(f"columns {strides[1]} apart" for _ in range(strides[1] != 1)),
        *(f"a box of {size}" for size in block if not 1 <= size <= 256),
        *(f"a box of {row} bytes" for _ in range(row % 16 != 0)),
    ]


@pytest.fixture(autouse=True)
def tensor_maps_that_a_driver_takes(monkeypatch):
    """Each descriptor of each test of this file. tests/first_launch.py asks a driver of the shipped tiles."""
    make = scaled_exp_triton.TensorDescriptor.from_tensor

    def checked(tensor, block):
        assert tensor_map_faults(tensor.data_ptr(), tensor.shape, tensor.stride(), block, tensor.itemsize) == []
        return make(tensor, block)

    monkeypatch.setattr(scaled_exp_triton.TensorDescriptor, "from_tensor", staticmethod(checked))


@pytest.mark.parametrize(
    ("address", "shape", "strides", "block", "faults"),
    [
        (4096, (70, 40), (40, 1), (16, 32), 0),
        (4104, (70, 40), (40, 1), (16, 32), 1),
        (4096, (70, 41), (41, 1), (16, 32), 1),
        (4096, (2**32 + 1, 40), (40, 1), (16, 32), 1),
        (4096, (70, 40), (80, 2), (512, 4), 3),
    ],
    ids=["good", "address", "row", "size", "columns and box"],
)
def test_the_rules_of_a_tensor_map(address, shape, strides, block, faults):
    assert len(tensor_map_faults(address, shape, strides, block, 2)) == faults


@pytest.fixture(params=[None, SMALL, replace(SMALL, halves=False)], ids=["shipped tiles", "small tiles", "whole tiles"])
def tiles(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr(scaled_exp_triton, "SIXTEEN_BIT", request.param)
        monkeypatch.setattr(scaled_exp_triton, "THIRTY_TWO_BIT", request.param)


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("with_entropy", [False, True], ids=["", "entropy"])
@pytest.mark.parametrize(("rows", "hidden_size"), [(1, 8), (70, 40)], ids=["one row", "parts of tiles"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_it_leaves_the_gradient_of_a_log_probability_but_for_a_factor_a_row(dtype, rows, hidden_size, with_entropy):
    case = operands(dtype, rows, hidden_size)
    result, gradient = leave(*case, with_entropy=with_entropy)
    log_probs, entropy, wanted = truth(*case)
    pairs = {
        "log_probs": (result.log_probs, log_probs, LOG_PROBS),
        # The difference of two numbers up to 30, relative to the label; each is rounded at 2e-6.
        "entropy": (result.entropy, entropy if with_entropy else 0 * entropy, ENTROPY),
        "gradient": (gradient[:, :REAL], wanted, TOLERANCES[dtype]),
    }
    errors = {name: float((got.double() - want).abs().max()) for name, (got, want, _) in pairs.items()}
    assert all(errors[name] <= limit for name, (_, _, limit) in pairs.items()), errors
    assert not gradient[:, REAL:].any()


def test_a_certain_label_keeps_its_digits():
    """1 - p_y of 1e-6 comes from the other columns; from p_y in float32 it would have one digit, from bfloat16's none."""
    hidden, weight, labels = operands(torch.float32, 4, 8)
    weight[labels] = 0.0
    hidden = torch.zeros_like(hidden)
    hidden[:, 0], weight[:, 0] = 1.0, -13.0
    weight[labels, 0] = 0.0
    case = (hidden[:1], weight, labels[:1])
    weight[labels[1:], 0] = -13.0
    _, gradient = leave(*case)
    _, _, wanted = truth(*case)
    there = int(labels[0])
    assert 1e-7 < float(wanted[0, there]) < 1e-5
    assert float(gradient[0, there]) == pytest.approx(float(wanted[0, there]), rel=1e-5)


@pytest.mark.parametrize(("number", "is_finite"), [(-math.inf, True), (math.nan, False)], ids=str)
def test_a_column_of_minus_infinity_adds_nothing_and_one_of_nan_is_seen(number, is_finite):
    hidden, weight, labels = operands(torch.float32, 5, 8)
    hidden, labels = hidden.abs(), labels.clamp(min=1)
    weight[0] = -1e4
    expected, _, _ = truth(hidden, weight, labels)
    weight[0] = number
    result, _ = leave(hidden, weight, labels)
    if is_finite:
        assert torch.allclose(result.log_probs.double(), expected, rtol=0, atol=5e-6) and bool(result.entropy.isfinite().all())
    else:
        assert bool(result.log_probs.isnan().all())


@pytest.mark.parametrize("label", [-100, REAL, WIDTH, 2**31, 2**32 + 1, -(2**32) + 1, 2**63 - 1], ids=str)
def test_a_label_outside_the_vocabulary_has_no_probability(label):
    """Also one whose last 32 bits are a valid label."""
    hidden, weight, labels = operands(torch.float32, 3, 8)
    expected, _, _ = truth(hidden, weight, labels)
    labels[1] = label
    result, _ = leave(hidden, weight, labels)
    assert float(result.log_probs[1]) == -math.inf
    assert torch.allclose(result.log_probs[::2].double(), expected[::2], rtol=0, atol=5e-6)


def test_logits_are_rounded_as_in_memory():
    """Else old log-probabilities, which come from logits in memory, would differ from new ones of the same weights.

    Logits 4 + j/32, and less than half a unit more in every third: the interpreter, which truncates, rounds them as a GPU does.
    """
    hidden, weight, labels = operands(torch.bfloat16, 70, 8)
    hidden[:, :2], hidden[:, 2:] = 1.0, 0.0
    columns = torch.arange(WIDTH, device=weight.device)
    weight[:, 0], weight[:, 1] = 4 + columns / 32, 0.012 * (columns % 3 == 0)
    options = {"temperature": TEMPERATURE, "vocab_size": REAL, "tp_group": SINGLE, "backend": "triton"}
    old = linear_log_probs(hidden, weight, labels, **options)
    result, _ = leave(hidden, weight, labels, rounds_logits=True)
    exact, _, _ = truth(hidden, weight, labels)
    assert float((result.log_probs - old).abs().max()) < 5e-6 < 1e-3 < float((old - exact).abs().max())


# In the fused head

WITHOUT_ENTROPY = [name for name, (_, terms, _, _) in KINDS.items() if terms is not True]


@functools.cache
def case_of(dtype: torch.dtype) -> HeadBatch:
    return head_batch(seed=8, hidden_size=8).to(dtype)


def run_scaled(name: str, case: HeadBatch, rows: int, options: dict, **more):
    moved, there = on_device(case, options, KERNEL_DEVICE)
    with counted_launches() as launches:
        result = run(fused(KINDS[name][0]), moved, backend="triton", max_logits_bytes=budget(case, rows), **there, **more)
    return result, Counter(launches)


def exact_of(name: str, case: HeadBatch, options: dict):
    wide = {key: value.double() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    return run(fused(KINDS[name][0]), case.to(torch.float64), backend="torch", **wide)


@pytest.mark.parametrize(
    ("name", "rows", "dtype"),
    [
        *((name, rows, torch.float32) for name in WITHOUT_ENTROPY for rows in (9, 1000)),
        *((name, 9, torch.bfloat16) for name in ("grpo", "gspo")),
    ],
    ids=str,
)
def test_every_plan_has_the_float64_gradients_without_a_row_kernel(name, rows, dtype):
    """As in test_unit_gradient.py. The interpreter truncates each e^z, but not their sum in the label's column: twice 2^-6."""
    case = case_of(dtype)
    options = options_of(name, case)
    got, launches = run_scaled(name, case, rows, options, scaled_exp=True)
    errors = worst_error(got, exact_of(name, case, options))
    limit = 3e-6 if dtype == torch.float32 else 2**-6 if ON_GPU else 2**-5
    assert errors["hidden"] < limit and errors["weight"] < limit, errors
    assert launches["scaled_exp_kernel"] and not launches["unit_gradient_kernel"], launches
    if rows == 1000:
        assert not launches["row_statistics_kernel"] + launches["logits_gradient_kernel"], launches


def test_two_pass_computes_the_other_chunks_again():
    case = head_batch([36], seed=8, hidden_size=8).to(torch.float32)
    terms = every_term(case.batch)
    options = {name: terms[name] for name in ("ref_log_probs", "kl_coefficient", "regularizer_weights")}
    options |= {"temperature": 0.7, "metrics": "basic"}
    got, launches = run_scaled("gspo", case, 9, options, scaled_exp=True)
    errors = worst_error(got, exact_of("gspo", case, options))
    assert errors["hidden"] < 3e-6 and errors["weight"] < 3e-6, errors
    wanted = {"scaled_exp_kernel": 1, "row_statistics_kernel": 1, "logits_gradient_kernel": 1}
    assert {name: launches[name] for name in wanted} == wanted, launches


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_row_far_away_from_its_label_has_the_result_of_its_logits(name):
    """log_prob is about -200: e^200 would be infinite. The chunk is computed with logits, the others are not."""
    case = case_of(torch.float32)
    hidden = case.hidden.clone()
    first = int(case.batch.loss_mask.nonzero()[0])
    label = case.weight[case.batch.labels[first]]
    hidden[first] = -200.0 * label / float(label @ label)
    old = case.batch.old_log_probs.clone()  # as now: the row then has a gradient
    old[first] = (hidden[first] @ case.weight.T / 0.7).log_softmax(-1)[case.batch.labels[first]]
    case = replace(case, hidden=hidden, batch=replace(case.batch, old_log_probs=old))
    options = options_of(name, case)
    want, _ = run_scaled(name, case, 9, options)
    got, launches = run_scaled(name, case, 9, options, scaled_exp=True)
    assert float(want.output.log_probs.min()) < -100
    errors = worst_error(got, want)
    assert max(errors.values()) < 3e-6, errors
    assert launches["unit_gradient_kernel"] + launches["row_statistics_kernel"] == 1, launches


def test_a_shift_that_rounds_far_above_its_label_has_the_result_of_its_logits():
    """Logits of 300 have steps of 2 in bfloat16, and at temperature 0.01 a step is e^200: a row's total would be 0."""
    case = case_of(torch.bfloat16)
    labels = case.weight[case.batch.labels].float()
    hidden = (300.0 * labels / labels.square().sum(-1, keepdim=True)).to(torch.bfloat16)
    case = replace(case, hidden=hidden, batch=replace(case.batch, old_log_probs=torch.zeros_like(case.batch.old_log_probs)))
    options = {**options_of("grpo", case), "temperature": 0.01}
    want, _ = run_scaled("grpo", case, 1, options)
    got, launches = run_scaled("grpo", case, 1, options, scaled_exp=True)
    errors = worst_error(got, want)
    # On a GPU the products of the two paths add up in other orders: a gradient may round to the next number of bfloat16, which is
    # up to 2^-7 of the largest one away.
    gradient_limit = 2**-7 if ON_GPU else 0
    assert errors["loss"] == errors["log_probs"] == 0 and max(errors["hidden"], errors["weight"]) <= gradient_limit, errors
    assert ON_GPU or launches["row_statistics_kernel"], launches


def test_a_hidden_state_that_is_not_finite_is_found_as_elsewhere():
    case = case_of(torch.float32)
    hidden = case.hidden.clone()
    hidden[case.batch.loss_mask.nonzero()[2]] = math.nan
    case = replace(case, hidden=hidden)
    if KERNEL_DEVICE == "cpu":
        with pytest.raises(DataError, match="not finite"):
            run_scaled("grpo", case, 1000, options_of("grpo", case), scaled_exp=True)
    else:
        result, _ = run_scaled("grpo", case, 1000, options_of("grpo", case), scaled_exp=True)
        assert int(result.output.num_nonfinite.sum()) == 1


class PretendedPair:
    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0


def off_by_eight_bytes(case: HeadBatch) -> HeadBatch:
    memory = torch.zeros(case.hidden.numel() + 2, device=KERNEL_DEVICE)[2:].view(case.hidden.shape)
    return replace(case, hidden=memory.copy_(case.hidden))


REFUSED = {
    "torch": (lambda case: case, {"backend": "torch"}, "needs backend='triton'"),
    "float16": (lambda case: case.to(torch.float16), {"loss_scale": 1.0}, "takes bfloat16 and float32, not torch.float16"),
    "hidden size": (lambda case: head_batch(seed=8).to(torch.float32), {}, "not hidden size 6 and 16 columns"),
    "alignment": (off_by_eight_bytes, {}, "begin at multiples of 16 bytes"),
    "entropy": (lambda case: case, {"entropy_coefficient": 0.3}, "no effect with an entropy term"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernel_does_not_take_is_refused(name):
    change, options, message = REFUSED[name]
    case = change(case_of(torch.float32))
    terms = every_term(case.batch)
    options = {**options, "regularizer_weights": terms["regularizer_weights"]} if "entropy_coefficient" in options else options
    case, options = on_device(case, options, KERNEL_DEVICE)
    labels, *rest = case.batch.arguments()
    with pytest.raises(ConfigError, match=message):
        fused("grpo")(case.hidden, case.weight, labels, *rest, **{"backend": "triton", "scaled_exp": True, **options})


def test_a_shard_is_refused():
    with pytest.raises(ConfigError, match="needs the whole vocabulary on a rank, not one of 2 shards"):
        case = case_of(torch.float32)
        linear_head.check_scaled_exp(case.hidden, case.weight, PretendedPair(), "triton")


def step_on_rank(rank: int, is_scaled: bool) -> tuple[dict, list[str]]:
    """(the gradients of a training step, the kernels that it launched)."""
    config = PolicyLossConfig(policy_loss="grpo", policy_loss_backend="triton", fused_lm_head_loss=True, scaled_exp_head=is_scaled)
    trainer = trainer_cases.tiny_trainer(config, vocab_size=64, **trainer_cases.STILL)
    samples = [replace(one, tokens=[token % 64 for token in one.tokens]) for one in trainer_cases.ragged_step()]
    with counted_launches() as launches:
        trainer.step([samples[:3], samples[3:]])
        return trainer_cases.gradients_of(trainer), list(launches)


@pytest.mark.megatron
@pytest.mark.interpreter
def test_training_takes_it_by_its_flag():
    (found, launches), (truth, others) = (run_ranks(step_on_rank, 1, is_scaled)[0] for is_scaled in (True, False))
    assert "scaled_exp_kernel" in launches and "scaled_exp_kernel" not in others
    difference = trainer_cases.relative_difference(*(trainer_cases.whole([shards], 64) for shards in (found, truth)))
    assert 0 < difference < 1e-5  # float32, sums in another order
