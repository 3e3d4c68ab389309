"""What NeMo-RL alone has of our losses: through an emulated worker always, through its own loss code with a checkout.

NEMO_RL_ROOT=... pytest -m host --require host tests/test_nemo_rl.py
"""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import nemo_rl_cases as cases
import own_log_probs
import pytest
import torch
from adapter_cases import (
    LOSSES,
    ONE_CALL,
    ROWS,
    Call,
    RowCase,
    Step,
    emulated,
    logits_of,
    too_large,
)
from forked import forked, in_fork
from host_checkouts import NEMO_RL
from nemo_rl_cases import ADAPTER, counts_of, mask_of

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import launch, nemo_rl, nemo_rl_loss
from megatron_rl.hosts.dense_rows import carry_prompt_weights
from megatron_rl.hosts.heads import log_probs
from megatron_rl.hosts.heads import nemo_rl as nemo_rl_head
from megatron_rl.hosts.heads.row_proxy import make_row_proxy
from megatron_rl.layout.context_parallel import chunk_spans
from megatron_rl.layout.groups import SINGLE
from megatron_rl.megatron.head import HeadInputs
from megatron_rl.testing.ranks import run_ranks

OF_KL = {"reference_policy_kl_penalty": 0.1, "megatron_rl_kl_estimator": "unbiased"}
TOKEN_MEAN = RowCase(loss="grpo", aggregation="token_mean")


def test_the_parts_of_a_metric_add_up_to_a_share_of_the_step():
    case = RowCase(loss="grpo", aggregation="token_mean", dp=2, sizes=(2, 5), num_samples=14, has_second_mask=True)
    plain, found = (ADAPTER.run(case, ADAPTER.step(case), **settings) for settings in ({}, OF_KL))
    assert sum(metrics["kl_penalty"] for metrics in found.metrics) == pytest.approx((found.loss - plain.loss) / 0.1, rel=1e-4)
    assert 0 < sum(metrics["clipped_ratio_fraction"] for metrics in found.metrics) < 1
    assert sum(metrics["loss"] for metrics in found.metrics) == pytest.approx(found.loss, rel=1e-5)


def test_kl_is_of_unfiltered_log_probs_where_nemo_rl_has_them():
    columns = ADAPTER.step(TOKEN_MEAN).columns
    mask, gradients = mask_of(columns), []
    unfiltered = torch.where(mask, -1.0, math.nan).requires_grad_()
    for penalty, of_ours in ((0.0, {}), (0.1, {}), (0.1, {"megatron_rl_kl_estimator": "k3"})):
        unfiltered.grad = None
        log_probs = torch.full(mask.shape, -1.0, requires_grad=True)
        loss = ADAPTER.loss(TOKEN_MEAN, reference_policy_kl_penalty=penalty, **of_ours)
        loss(log_probs, columns | {nemo_rl_loss.UNFILTERED: unfiltered}, *counts_of(columns))[0].backward()
        gradients.append(log_probs.grad)
        assert not penalty or torch.equal(unfiltered.grad != 0, mask)
    assert torch.equal(*gradients[:2]) and torch.equal(*gradients[1:])


def test_a_worker_gets_the_loss_pickled_and_the_name_that_was_typed():
    """Nothing but a dotted path tells a worker's process what to import."""
    typed = "megatron_rl.losses.gspo.gspo"
    loss = pickle.loads(pickle.dumps(ADAPTER.loss(TOKEN_MEAN, megatron_rl=f"{typed}.token_mean")))
    assert loss.config.policy_loss == typed and loss.launch.config == loss.config


# The step


def test_placeholders_in_the_place_of_the_steps_counts_are_refused():
    case = RowCase(loss="grpo", aggregation="sample_mean")
    loss, data = ADAPTER.loss(case), ADAPTER.step(case).columns
    log_probs = torch.zeros(16, data["token_mask"].shape[1] - 1)
    with pytest.raises(DataError, match="a step of 1 samples and 1 tokens to a call with 16 samples"):
        loss(log_probs, data, torch.tensor(1.0), torch.tensor(1.0))


def test_a_prompt_without_a_trained_token_does_not_count():
    """Two samples of 2 tokens for one prompt, and two masked ones for another: 1 / (P M_g) x m x S is 1 / (1 x 4) x 2 x 4."""
    mask = torch.tensor([[0.0, 1.0, 1.0]] * 2 + [[0.0, 0.0, 0.0]] * 2)
    found = carry_prompt_weights(torch.ones(4, 3), mask, torch.tensor([[0], [0], [1], [1]]))
    assert found.tolist() == [pytest.approx([0.0, 2.0, 2.0], rel=1e-5)] * 2 + [[0.0] * 3] * 2  # a mark of 5 of 24 bits


@pytest.mark.parametrize("change", ["no companion", "mask", "batch"])
def test_advantages_without_the_weights_of_their_step_are_refused(change):
    case = RowCase(loss="grpo", aggregation="prompt_mean")
    step, loss = ADAPTER.step(case), ADAPTER.loss(case)
    if change == "no companion":
        step.columns["advantages"] = ADAPTER.step(RowCase(loss="grpo", aggregation="sample_mean")).columns["advantages"]
    elif change == "mask":
        step.columns["token_mask"][:, -8:] = 0
    else:
        loss.samples_per_step = 15
    with pytest.raises(DataError, match="do not have the weights of their prompt groups"):
        ADAPTER.run(case, step, start=lambda case, step, _: ADAPTER.by(cases.emulated_call, loss, case, step))


# Tokens that NeMo-RL's trainer leaves out of its distribution


@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean"])
@pytest.mark.parametrize(
    ("zeros", "settings"), [(("new",), {}), (("old",), {}), (("new", "old"), {}), (("new",), {"force_on_policy_ratio": True})]
)
def test_a_token_that_the_trainer_leaves_out_has_no_gradient_and_stays_counted(zeros, settings, aggregation):
    """FB-161: NeMo-RL gives it the log-probability 0.0, beside the sampler's of -5.4; the others learn as if it were not there.

    zeros: which of the trainer's scores of the token is 0.0, in this step or before it."""
    case = RowCase(loss="grpo", aggregation=aggregation)
    loss, columns = ADAPTER.loss(case, top_p=0.8, **settings), ADAPTER.step(case).columns
    mask = mask_of(columns)
    row, place = (int(index) for index in mask.nonzero()[1])
    columns["generation_logprobs"] = columns["prev_logprobs"].clone()
    columns["generation_logprobs"][row, place + 1] = -5.4

    def gradient(left_out: bool) -> tuple[torch.Tensor, dict[str, Any]]:
        log_probs, batch = columns["prev_logprobs"][:, 1:] + 0.1, {n: values.clone() for n, values in columns.items()}
        if left_out and "new" in zeros:
            log_probs[row, place] = 0.0
        if left_out and "old" in zeros:
            batch["prev_logprobs"][row, place + 1] = 0.0
        log_probs.requires_grad_()
        value, metrics = loss(log_probs, batch, *counts_of(columns))
        value.backward()
        return log_probs.grad, metrics

    (clean, of_clean), (got, metrics) = gradient(False), gradient(True)
    assert clean[row, place] != 0 and of_clean[nemo_rl_loss.UNSCORED] == 0
    expected = clean.clone()
    expected[row, place] = 0
    assert torch.equal(got, expected)
    assert metrics[nemo_rl_loss.UNSCORED] == 1 / int(mask.sum())
    # NeMo-RL's own metrics: a ratio of 1 in its place, and not e^5.
    ratio = math.exp(0.1)
    assert metrics["probs_ratio"] == pytest.approx(ratio + (1 - ratio) / int(mask.sum()), rel=1e-5)


def test_a_sure_token_and_a_sampler_of_the_whole_vocabulary_leave_none_out():
    """FB-161: where one token is kept, every score of it is 0; without top-p nothing looks."""
    columns = ADAPTER.step(TOKEN_MEAN).columns
    columns |= dict.fromkeys(("prev_logprobs", "generation_logprobs"), torch.zeros_like(columns["prev_logprobs"]))
    for top_p, sampled, share in ((0.8, 0.0, 0.0), (0.8, -5e-4, 0.0), (0.8, -2e-3, 1.0), (1.0, -2e-3, None)):
        batch = columns | {"generation_logprobs": columns["generation_logprobs"] + sampled}
        loss = ADAPTER.loss(TOKEN_MEAN, top_p=top_p)
        log_probs = torch.zeros_like(columns["prev_logprobs"][:, 1:]).requires_grad_()
        assert loss(log_probs, batch, *counts_of(columns))[1].get(nemo_rl_loss.UNSCORED) == share


@pytest.mark.parametrize("has_mask", [True, False])
def test_a_replay_counts_where_nemo_rl_can_do_it(has_mask, monkeypatch):
    """A release that cannot replay takes the setting for one of vLLM, and keeps tokens by its own logits."""
    module = SimpleNamespace(**{"SamplingMask": object} if has_mask else {})
    monkeypatch.setitem(sys.modules, "nemo_rl", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.logits_sampling_utils", module)

    def launch(loss: str = "grpo", **loss_fn: Any) -> nemo_rl.Launch:
        config = cases.master_config({"megatron_rl": f"{loss}.token_mean"} | loss_fn, top_p=0.8)
        config.policy["generation"]["vllm_kwargs"] = {"return_sampling_mask": True}
        return nemo_rl.read(config)

    assert nemo_rl.NemoLoss(cases.OwnLoss({}), launch(), 16).has_unscored is not has_mask
    with contextlib.nullcontext() if has_mask else pytest.raises(ConfigError, match="the policy loss gspo"):
        launch("gspo")
    with pytest.raises(ConfigError, match="a ratio among the sets" if has_mask else "counts as a sure one"):
        launch(megatron_rl_kl_estimator="unbiased")


# The start

TRAINER = """
class ClippedPGLossFn:
    def __init__(self, cfg, use_fused_linear_logprobs=False): pass
    def __call__(self, next_token_logprobs, data, global_valid_seqs, global_valid_toks): pass
    force_on_policy_ratio = False
    input_type = loss_type = use_fused_linear_logprobs = metric_normalizations = reference_policy_kl_penalty = None
class Estimator:
    def compute_advantage(self, prompt_ids, rewards, mask, **kwargs): return rewards
def _create_advantage_estimator(master_config): return Estimator()
def MasterConfig(loss_fn):
    import nemo_rl_cases
    return nemo_rl_cases.master_config(loss_fn)
def setup(master_config, tokenizer): return ClippedPGLossFn(master_config.loss_fn, use_fused_linear_logprobs=False)
"""
# Two trainers of a process; each makes its estimator after the setup of both.
SCRIPT = """
import sys
import nemo_rl_cases
from megatron_rl.hosts.choice import read_word
from nemo_rl.algorithms.grpo import setup
import nemo_rl.algorithms.grpo as trainer
words = [word.removeprefix("++loss_fn.").split("=") for word in sys.argv[1:]]
given = dict((name, read_word(text)) for name, text in words)
configs = [nemo_rl_cases.master_config(one) for one in (given, dict(megatron_rl="gspo.sample_mean"))]
losses = [setup(config, "tokenizer") for config in configs]
for config, loss in zip(configs, losses):
    kind = type(trainer._create_advantage_estimator(config).compute_advantage).__name__
    print(type(loss).__name__, loss.launch, loss.samples_per_step, kind)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "run_grpo.py"
    path.write_text(SCRIPT)
    return path


def launched(script, *arguments: str) -> tuple[int | None, str, str]:
    def work() -> int:
        sys.modules.update(emulated(TRAINER, nemo_rl.TRAINER))
        return launch.main([str(script), *arguments])

    return forked(work)


def test_the_launcher_puts_our_loss_and_our_estimator_into_nemo_rl(script):
    code, out, error = launched(script, "++loss_fn.megatron_rl=gspo.prompt_mean")
    assert code == 0, error
    assert out.split("\n")[:2] == ["NemoLoss gspo.prompt_mean 16 function", "NemoLoss gspo.sample_mean 16 method"]


def test_the_launcher_ends_with_each_problem_and_after_a_check_without_one(script, monkeypatch):
    """In setup, before a worker is made."""
    line = ("++loss_fn.megatron_rl=grpo.prompt_mean", "++loss_fn.use_cispo=True", "++loss_fn.positive_example_nll_weight=1")
    code, out, error = launched(script, *line)
    assert (code, out) == (2, "")
    assert "two losses in one launch" in error and "weight depends on the micro-batch size" in error and "Traceback" not in error
    monkeypatch.setenv("MEGATRON_RL_CHECK", "1")
    code, out, error = launched(script, "++loss_fn.megatron_rl=gspo.token_mean")
    assert (code, out) == (0, "") and "megatron_rl=gspo.token_mean in NeMo-RL" in error and "ends here" in error


# Workers with our log-probabilities and head


class Policy:
    def __init__(self, config, worker_extension_cls_fqn=None):
        self.worker = worker_extension_cls_fqn


def setup(master_config, tokenizer, policy_factory=None):
    return (Policy if policy_factory is None else policy_factory)(config=master_config)


ALONE = {"megatron_rl_log_probs": "megatron_rl"}
BESIDE_OURS = {"megatron_rl": "grpo.token_mean", "reference_policy_kl_penalty": 0}
BY_FACTORY = {"policy_factory": lambda **options: Policy(**options)}
WORKERS = [
    # loss_fn, use_fused_linear_logprobs, arguments of setup -> the class of the workers, the loss, the fused head of NeMo-RL
    (ALONE, None, {}, nemo_rl_head.OUR_WORKER, "OwnLoss", None),
    (ALONE | BESIDE_OURS, None, {}, nemo_rl_head.OUR_WORKER, "NemoLoss", None),
    (ALONE | BESIDE_OURS, None, BY_FACTORY, nemo_rl_head.OUR_WORKER, "NemoLoss", None),
    (BESIDE_OURS, None, {}, None, "NemoLoss", None),
    (ALONE, True, {}, nemo_rl_head.WORKER_WITH_HEAD, "OwnLoss", False),
    (BESIDE_OURS, True, {}, None, "NemoLoss", True),  # NeMo-RL's own switch
    (BESIDE_OURS | {"megatron_rl_log_probs": "nemo_rl"}, None, BY_FACTORY, None, "NemoLoss", None),
]


def test_the_workers_of_a_launch_of_nemo_rl():
    """By the launcher: our workers with our loss and with NeMo-RL's own, one after the other in one process."""

    def work():
        def whole_setup(master_config, tokenizer, policy_factory=None):
            policy = setup(master_config, tokenizer, policy_factory)
            loss = type(trainer.ClippedPGLossFn(master_config.loss_fn)).__name__
            return policy.worker, loss, master_config.policy["megatron_cfg"].get("use_fused_linear_logprobs")

        contents = {"setup": whole_setup, "Policy": Policy, "ClippedPGLossFn": cases.OwnLoss}
        contents["_create_advantage_estimator"] = lambda master_config: "NeMo-RL's own"
        trainer = own_log_probs.module_at(nemo_rl.TRAINER, contents)
        environments = {nemo_rl_head.OWN_WORKER: "its Python"}
        own_log_probs.module_at(nemo_rl_head.ENVIRONMENTS, {"ACTOR_ENVIRONMENT_REGISTRY": environments})
        sys.argv = ["run_grpo.py"]
        calls: list[str] = []
        with nemo_rl.loss_in_setup(lambda error: 2, calls):
            for settings, is_fused, named, *expected in WORKERS:
                config = cases.master_config(settings)
                if is_fused is not None:
                    config.policy["megatron_cfg"]["use_fused_linear_logprobs"] = is_fused
                assert [*trainer.setup(config, tokenizer="tokenizer", **named)] == expected, settings
                assert config.policy["megatron_cfg"].get("use_fused_linear_logprobs") is is_fused, "the caller's own stays"
            assert trainer._create_advantage_estimator(cases.master_config(ALONE)) == "NeMo-RL's own"
        assert environments[nemo_rl_head.WORKER_WITH_HEAD] == environments[nemo_rl_head.OUR_WORKER] == "its Python"
        assert len(calls) == len(WORKERS) and trainer.setup is whole_setup

    in_fork(work)


# NeMo-RL's own code


def load_nemo_rl(cp_group, is_fused=False):
    """(its ClippedPGLossFn by settings, a call through its LossPostProcessor). For a rank that ends with the test: an index that
    NeMo-RL's gather sends to the GPU stays on the CPU.

    is_fused: the model gives the rows of logits as hidden states of a head whose weight is the unit matrix, and the call is
    NeMo-RL's forward step."""
    make_tensor = torch.tensor
    torch.tensor = lambda *given, pin_memory=False, **options: make_tensor(*given, **options)
    torch.Tensor.cuda = lambda tensor, **options: tensor
    losses = NEMO_RL.load("nemo_rl.algorithms.loss.loss_functions")
    train = NEMO_RL.load("nemo_rl.models.megatron.train")
    batches = NEMO_RL.load("nemo_rl.distributed.batched_data_dict")
    alone = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
    groups = {"tensor_model_parallel": alone[torch.distributed.get_rank()], "context_parallel": cp_group}
    for kind, group in groups.items():
        vars(train)[f"get_{kind}_group"] = lambda group=group: group
        vars(train)[f"get_{kind}_rank"] = group.rank
        vars(train)[f"get_{kind}_world_size"] = group.size

    names = ("input_ids", "attention_mask", "position_ids", "cu_seqlens_padded", "mtp_loss_mask", "routed_experts_cp_sharded")
    nothing = dict.fromkeys((*names, "media_token_validity_mask"))

    def call(case, loss, data, rows, counts, num_microbatches):
        packing = {"enabled": case.packing != ROWS, "fuse_loss": case.packing == ONE_CALL}
        processor = train.LossPostProcessor(loss_fn=loss, cfg={"sequence_packing": packing}, num_microbatches=num_microbatches)
        logits = [logits_of(values[:-1], ids) for values, ids in zip(rows, data["input_ids"], strict=True)]
        packed = None
        if packing["enabled"]:
            lengths, unit = [len(part) for part in logits], max(4, 2 * cp_group.size())
            padded = [-(-length // unit) * unit for length in lengths]
            bounds = [torch.tensor([0, *lengths]).cumsum(0).int(), torch.tensor([0, *padded]).cumsum(0).int()]
            packed = train.PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds[0], cu_seqlens_q_padded=bounds[1])
            whole = [torch.nn.functional.pad(part, (0, 0, 0, size - len(part))) for part, size in zip(logits, padded, strict=True)]
            spans = [chunk_spans(size, cp_group.rank(), cp_group.size()) for size in padded]
            own_parts = [part[start:end] for part, of_part in zip(whole, spans, strict=True) for start, end in of_part]
            output = torch.cat(own_parts)[None]
        else:
            width = data["token_mask"].shape[1]
            output = torch.stack([torch.nn.functional.pad(part, (0, 0, 0, width - len(part))) for part in logits])
        batch = batches.BatchedDataDict(data)
        if not is_fused:
            return processor(batch, packed, *counts)(output)
        inputs = HeadInputs(output.transpose(0, 1).contiguous(), torch.eye(output.shape[-1]), False)
        carried = make_row_proxy(inputs, SINGLE, nemo_rl_head.FUSED_HEAD)
        given = SimpleNamespace(data_dict=batch, input_ids_cp_sharded=torch.zeros(1), packed_seq_params=packed, **nothing)
        found, process = train.forward_with_post_processing_fn(
            iter([given]),
            lambda **inputs: carried.transpose(0, 1).contiguous(),
            processor,
            global_valid_seqs=counts[0],
            global_valid_toks=counts[1],
            sampling_params=SimpleNamespace(temperature=1.0, top_k=None, top_p=1.0),
        )
        return process(found)

    def own(settings):
        return losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**settings))

    return own, call


def errors_by_nemo_rl(rank: int, chosen: list[RowCase], is_fused: bool | None = None) -> dict[str, float]:
    """is_fused: by our log-probabilities, from logits or from hidden states; None: by NeMo-RL's."""
    group = torch.distributed.group.WORLD
    own, call = load_nemo_rl(group, bool(is_fused))
    if is_fused is not None:
        own_log_probs.install("NeMo-RL")
        log_probs.MAX_LOGITS_BYTES = 5 * 50 * 4

    def start(case: RowCase, step: Step, _: Any, **settings: Any) -> Call:
        return ADAPTER.by(call, ADAPTER.loss(case, own, **settings), case, step)

    return {str(case): ADAPTER.error(case, start=start, cp_group=group) for case in chosen}


@pytest.mark.host("NEMO_RL_ROOT")
@pytest.mark.parametrize("is_fused", [None, False, True], ids=["NeMo-RL's log-probabilities", "ours", "our head"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_nemo_rls_own_loss_path_is_exact_with_ours(cp, is_fused):
    """Three losses, four aggregations, packings, dp and micro-batches, ragged groups, fully masked and dropped samples; real cp
    ranks, where NeMo-RL gathers the log-probabilities, always packs, and refuses its own head."""
    chosen = [case for case in ADAPTER.matrix(LOSSES) if case.cp == cp and (cp == 1 or case.packing != ROWS)]
    for found in run_ranks(errors_by_nemo_rl, cp, chosen, is_fused, timeout=500, use_megatron=False):
        assert len(found) == len(chosen) >= 24 and not too_large(found)


@pytest.mark.host("NEMO_RL_ROOT")
def test_our_adapter_fits_nemo_rls_own_trainer():
    """Its loss and estimators as the launcher wraps them; setup, which starts a cluster, is replaced by what it does with them."""

    def work() -> None:
        trainer = NEMO_RL.load(nemo_rl.TRAINER)
        nemo_rl.CONTRACT.check()

        def setup(master_config):
            return trainer.ClippedPGLossFn(master_config.loss_fn, use_fused_linear_logprobs=False)

        trainer.setup = setup
        settings = trainer.ClippedPGLossConfig(megatron_rl="gspo.prompt_mean", reference_policy_kl_penalty=0.0)
        config = cases.master_config(settings, samples=4, num_prompts_per_step=2, num_generations_per_prompt=2)
        config.grpo.adv_estimator = trainer.AdvEstimatorConfig()
        with nemo_rl.loss_in_setup(lambda error: 2, []):
            loss = trainer.setup(config)
            assert isinstance(loss, nemo_rl.NemoLoss) and type(loss.own).__name__ == "ClippedPGLossFn"
            prompts, rewards = torch.tensor([[1, 2], [1, 2], [3, 4], [3, 4]]), torch.tensor([1.0, 0.0, 0.0, 1.0])
            mask = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 0, 0]])
            given = {"prompt_ids": prompts, "rewards": rewards, "mask": mask, "repeated_batch": {}}
            weighed = trainer._create_advantage_estimator(config).compute_advantage(**given)
        plain = trainer._create_advantage_estimator(config).compute_advantage(**given)
        factors = torch.tensor([4 / 2 * 4 / 5, 4 / 2 * 1 / 5, 1.0, 1.0])[:, None]
        assert torch.allclose(weighed, plain * factors * mask, rtol=1e-5)

    in_fork(work)
