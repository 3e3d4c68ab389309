"""Our losses in NeMo-RL: through an emulated worker always, through its own loss code with a checkout.

NEMO_RL_ROOT=... pytest -m host --require host tests/test_nemo_rl.py
"""

from __future__ import annotations

import math
import pickle
import re
import sys
import textwrap
from types import SimpleNamespace
from typing import Any

import nemo_rl_cases as cases
import pytest
import torch
from dense_row_cases import LOSSES, logits_of, too_large
from forked import forked, in_fork
from host_checkouts import NEMO_RL
from nemo_rl_cases import Case

from megatron_rl.errors import ConfigError, DataError
from megatron_rl.hosts import launch, nemo_rl, nemo_rl_loss
from megatron_rl.hosts.choice import read_word
from megatron_rl.hosts.dense_rows import carry_prompt_weights
from megatron_rl.layout.context_parallel import chunk_spans
from megatron_rl.testing.oracle import ESTIMATORS
from megatron_rl.testing.ranks import run_ranks


def test_the_parts_of_a_metric_add_up_to_a_share_of_the_step():
    case = Case(loss="grpo", aggregation="token_mean", dp=2, sizes=(2, 5), num_samples=14, has_dropped=True)
    found = cases.run_step(case, cases.make_step(case), cases.make_loss(case))
    assert 0 < sum(metrics["clipped_ratio_fraction"] for metrics in found.metrics) < 1


def kl_of(step: cases.Step, estimator: str | None, coefficient: float) -> tuple[float, list[torch.Tensor]]:
    """Term and gradient in float64, a mean over the samples; None: k3 of the host, a mean over tokens. The reference is 0.3 above
    the old policy."""
    num_tokens = sum(sum(sample.loss_mask) for sample in step.samples)
    total, gradients = 0.0, []
    for values, sample in zip(step.log_probs, step.samples, strict=True):
        leaf, old = values.double().requires_grad_(), torch.tensor(sample.old_log_probs, dtype=torch.float64)
        mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
        weight = coefficient * mask / (max(float(mask.sum()), 1) * len(step.samples) if estimator else num_tokens)
        value, trained = ESTIMATORS[estimator or "k3"](leaf, old + 0.3, leaf - old)
        gradients += torch.autograd.grad((weight * trained).sum(), leaf)
        total += float((weight * value).sum())
    return total, gradients


def check_kl(case: Case, estimator: str | None, **by: Any) -> None:
    """by: a call and a cp_group of nemo_rl_cases.run_step, and NeMo-RL's own loss."""
    step, own = cases.make_step(case), by.pop("own", cases.OwnLoss)
    settings = {"reference_policy_kl_penalty": 0.1, "megatron_rl_kl_estimator": estimator}
    without, with_kl = (cases.run_step(case, step, cases.make_loss(case, own, **given), **by) for given in ({}, settings))
    total, gradients = kl_of(step, estimator, 0.1)
    for plain, found, expected in zip(without.gradients, with_kl.gradients, gradients, strict=True):
        assert torch.allclose((found - plain).double(), expected, rtol=1e-4, atol=1e-8)  # a difference of float32 gradients
    assert with_kl.loss - without.loss == pytest.approx(total, rel=1e-4)
    assert estimator is None or sum(log["kl_penalty"] for log in with_kl.metrics) == pytest.approx(total / 0.1, rel=1e-4)


@pytest.mark.parametrize("aggregation", ["constant", "prompt_mean"])
@pytest.mark.parametrize("estimator", [None, "k2", "unbiased"])
def test_kl_is_the_hosts_with_its_own_weight_and_by_an_estimator_of_ours_the_mean_over_samples(estimator, aggregation):
    check_kl(Case(loss="grpo", aggregation=aggregation, sizes=(3, 5), cp=2, packing="a call a sequence"), estimator)


def test_kl_is_of_unfiltered_log_probs_where_nemo_rl_has_them():
    case = Case(loss="grpo", aggregation="token_mean")
    columns = cases.make_step(case).columns
    mask = (columns["token_mask"] * columns["sample_mask"][:, None])[:, 1:].bool()
    unfiltered = torch.where(mask, -1.0, math.nan).requires_grad_()
    gradients = []
    for penalty, of_ours in ((0.0, {}), (0.1, {}), (0.1, {"megatron_rl_kl_estimator": "k3"})):
        unfiltered.grad = None
        log_probs = torch.full(mask.shape, -1.0, requires_grad=True)
        loss = cases.make_loss(case, reference_policy_kl_penalty=penalty, **of_ours)
        counts = columns["sample_mask"].sum(), mask.sum()
        loss(log_probs, columns | {nemo_rl_loss.UNFILTERED: unfiltered}, *counts)[0].backward()
        gradients.append(log_probs.grad)
        assert not penalty or torch.equal(unfiltered.grad != 0, mask)
    assert torch.equal(*gradients[:2]) and torch.equal(*gradients[1:])


@pytest.mark.parametrize(
    ("kind", "low", "high", "factor"),
    [
        (None, None, None, math.exp(0.1)),
        ("tis", None, 1.05, 1.05),
        ("seq-mask-tis", 0.9, 1.2, math.exp(0.1)),  # of each sample, whose mean is inside and outside
        ("seq-mask-tis", 0.9, 1.1, 0.0),
    ],
)
def test_sampling_weights_are_those_of_the_settings(kind, low, high, factor):
    """The sampler's log-probabilities are 0.1 lower, so each weight is exp(0.1) = 1.105."""
    case = Case(loss="cispo", aggregation="token_mean", sizes=(3, 5))
    bounds = {"truncated_importance_sampling_ratio_min": low, "truncated_importance_sampling_ratio": high}
    on = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": kind} | bounds
    step = cases.make_step(case)
    plain, found = (cases.run_step(case, step, cases.make_loss(case, **given)).loss for given in ({}, on))
    assert found == pytest.approx(plain * factor, rel=1e-5)


def test_on_policy_ratios_ignore_the_placeholder_of_old_log_probs():
    case = Case(loss="grpo", aggregation="sample_mean")
    step = cases.make_step(case)
    step.columns["prev_logprobs"] = torch.full_like(step.columns["prev_logprobs"], -50.0)
    found = cases.run_step(case, step, cases.make_loss(case, force_on_policy_ratio=True))
    by_hand = [-s.advantage * bool(sum(s.loss_mask)) / len(step.samples) for s in step.samples]
    assert found.loss == pytest.approx(sum(by_hand), abs=1e-6)


def test_a_worker_imports_a_loss_of_ones_own(tmp_path, monkeypatch):
    """The driver pickles the loss; nothing but its dotted path tells a worker's process what to import."""
    (tmp_path / "my_losses.py").write_text(
        "from megatron_rl import register_policy_loss\n\n@register_policy_loss('of mine')\ndef mine(log_ratio, advantages):\n"
        "    return -advantages * log_ratio.exp()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    case = Case(loss="gmpo", aggregation="token_mean", sizes=(3, 5))

    def driver() -> None:
        found = nemo_rl.read(cases.master_config({"megatron_rl": "my_losses.mine.token_mean"}))
        (tmp_path / "loss").write_bytes(pickle.dumps(nemo_rl.NemoLoss(cases.make_loss(case).own, found, 16)))

    def worker() -> None:
        found = cases.run_step(case, cases.make_step(case), pickle.loads((tmp_path / "loss").read_bytes()))
        assert found.loss != 0 and any(gradient.any() for gradient in found.gradients)

    in_fork(driver)
    in_fork(worker)


# Refusals


def test_placeholders_in_the_place_of_the_steps_counts_are_refused():
    case = Case(loss="grpo", aggregation="sample_mean")
    loss, data = cases.make_loss(case), cases.make_step(case).columns
    log_probs = torch.zeros(16, data["token_mask"].shape[1] - 1)
    with pytest.raises(DataError, match="a step of 1 samples and 1 tokens to a call with 16 samples"):
        loss(log_probs, data, torch.tensor(1.0), torch.tensor(1.0))
    with pytest.raises(DataError, match="a step of 16 samples and 1 tokens"):
        loss(log_probs, data, torch.tensor(16.0), torch.tensor(1.0))


def test_a_prompt_without_a_trained_token_does_not_count():
    """Two samples of 2 tokens for one prompt, and two masked ones for another: 1 / (P M_g) x m x S is 1 / (1 x 4) x 2 x 4."""
    mask = torch.tensor([[0.0, 1.0, 1.0]] * 2 + [[0.0, 0.0, 0.0]] * 2)
    found = carry_prompt_weights(torch.ones(4, 3), mask, torch.tensor([[0], [0], [1], [1]]))
    assert found.tolist() == [pytest.approx([0.0, 2.0, 2.0], rel=1e-5)] * 2 + [[0.0] * 3] * 2  # a mark of 5 of 24 bits


@pytest.mark.parametrize("change", ["no companion", "mask", "batch"])
def test_advantages_without_the_weights_of_their_step_are_refused(change):
    case = Case(loss="grpo", aggregation="prompt_mean")
    step = cases.make_step(case)
    if change == "no companion":
        step.columns["advantages"] = cases.make_step(Case(loss="grpo", aggregation="sample_mean")).columns["advantages"]
    elif change == "mask":
        step.columns["token_mask"] = step.columns["token_mask"] * (
            torch.rand(16, 1, generator=torch.Generator().manual_seed(1)) < 2
        )
        step.columns["token_mask"][:, -8:] = 0
    loss = cases.make_loss(case)
    loss.samples_per_step = 15 if change == "batch" else 16
    with pytest.raises(DataError, match="do not have the weights of their prompt groups"):
        cases.run_step(case, step, loss)


GRPO = "megatron_rl=grpo.token_mean"
# loss_fn as a line types it, what is said
REFUSED = {
    "": "megatron_rl=None does not name a loss and an aggregation, as .*Losses: .*gspo.*Aggregations: .*prompt_mean",
    "megatron_rl=gspo.sample_mean sequence_level_importance_ratios=true": "two losses in one launch.*gspo",
    "megatron_rl=grpo.sample_mean use_cispo=true": "two losses in one launch.*cispo",
    "megatron_rl=grpo.sample_mean disable_ppo_ratio=true": "two losses in one launch.*reinforce",
    "megatron_rl=grpo.sample_mean positive_example_nll_weight=0.1": "depends on the micro-batch size",
    "megatron_rl=grpo.row_mean": "NeMo-RL does not hand over what row_mean needs",
    "megatron_rl=dro.prompt_mean": "a loss must be proportional to the advantage, and dro is not",
    "megatron_rl=grpo.constant": r"\+\+loss_fn.megatron_rl_loss_aggregation_divisor=None: constant needs its L",
    f"{GRPO} megatron_rl_log_prob=megatron_rl": "log_prob=megatron_rl has no effect: grpo.token_mean reads clip_ratio_c",
    f"{GRPO} megatron_rl_clip_ratio_c=3": "has no effect: set loss_fn.ratio_clip_c",
    f"{GRPO} megatron_rl_kl_coefficient=0.1": "=0.1 has no effect: set loss_fn.reference_policy_kl_penalty",
    f"{GRPO} megatron_rl_kl_estimator=k4": "'k4' is not registered; known: k1, k2, k3, k3\\+, unbiased",
    f"{GRPO} megatron_rl_kl_estimator=k3 reference_policy_kl_penalty=0": "=k3 has no effect without a coef.*set lo",
    f"{GRPO} megatron_rl_kl_estimator=k3 reference_policy_kl_penalty=-1": "penalty=-1.0 must be at or above 0",
    f"{GRPO} megatron_rl_kl_estimator=k3 use_kl_in_reward=true": "=k3 has no effect beside loss_fn.use_kl_in_rew",
    f"{GRPO} use_importance_sampling_correction=true truncated_importance_sampling_type=seq-mask": (
        "importance_sampling_type=seq-mask: our losses have tis, icepop, seq-mask-tis"
    ),
    "megatron_rl=dppo_tv.token_mean use_importance_sampling_correction=true": "would be counted twice",
    f"{GRPO} megatron_rl_importance_correction=tis use_importance_sampling_correction=true": (
        "importance_correction=tis has no effect: set loss_fn.use_importance_sampling_correction=true"
    ),
}


@pytest.mark.parametrize("line", REFUSED)
def test_settings_that_are_not_honoured_are_refused(line):
    loss_fn = {name: read_word(text) for name, text in (word.split("=") for word in line.split())}
    with pytest.raises(ConfigError, match=REFUSED[line]):
        nemo_rl.read(cases.master_config(loss_fn))


def test_a_clip_that_is_nemo_rls_default_is_the_losss_own():
    """Its 0.2 would never clip the geometric mean of gspo."""
    for loss_fn, clip in (({}, (None, None)), ({"ratio_clip_max": 0.28}, (None, 0.28))):
        config = nemo_rl.read(cases.master_config({"megatron_rl": "grpo.token_mean", "ratio_clip_min": 0.2} | loss_fn)).config
        assert (config.clip_ratio_low, config.clip_ratio_high) == clip


def test_a_setting_of_ours_that_is_null_is_none():
    loss_fn = {"megatron_rl": "grpo.token_mean", "megatron_rl_kl_estimator": None, "reference_policy_kl_penalty": 0.1}
    assert nemo_rl.read(cases.master_config(loss_fn)).config.kl_coefficient == 0


@pytest.mark.parametrize("name", cases.AFTER_THE_ESTIMATOR)
def test_advantages_that_are_written_after_the_estimator_are_refused_with_prompt_mean_alone(name):
    nemo_rl.read(cases.master_config({"megatron_rl": "grpo.sample_mean"}, **{name: -5.0}))
    with pytest.raises(ConfigError, match=f"grpo.{name}=-5.0 beside grpo.prompt_mean"):
        nemo_rl.read(cases.master_config({"megatron_rl": "grpo.prompt_mean"}, **{name: -5.0}))


def test_a_step_that_cuts_a_batch_and_another_backend_are_refused():
    config = cases.master_config({"megatron_rl": "grpo.prompt_mean"}, num_prompts_per_step=8)
    config.policy["megatron_cfg"] = {"enabled": False}
    with pytest.raises(ConfigError, match="megatron_cfg.enabled is not true[^$]*set it to 32"):
        nemo_rl.read(config)


@pytest.mark.parametrize("aggregation", ["sample_mean", "prompt_mean"])
@pytest.mark.parametrize(
    ("zeros", "settings"), [(("new",), {}), (("old",), {}), (("new", "old"), {}), (("new",), {"force_on_policy_ratio": True})]
)
def test_a_token_that_the_trainer_leaves_out_has_no_gradient_and_stays_counted(zeros, settings, aggregation):
    """FB-161: NeMo-RL gives it the log-probability 0.0, beside the sampler's of -5.4; the others learn as if it were not there.

    zeros: which of the trainer's scores of the token is 0.0, in this step or before it."""
    case = Case(loss="grpo", aggregation=aggregation)
    given = cases.loss_settings(case) | settings
    found = nemo_rl.read(cases.master_config(given, top_p=0.8))
    loss = nemo_rl.NemoLoss(cases.OwnLoss(given | {"reference_policy_kl_penalty": 0.0}), found, case.num_samples)
    columns = cases.make_step(case).columns
    mask = (columns["token_mask"] * columns["sample_mask"][:, None])[:, 1:].bool()
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
        value, metrics = loss(log_probs, batch, columns["sample_mask"].sum(), mask.sum())
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
    case = Case(loss="grpo", aggregation="token_mean")
    given, columns = cases.loss_settings(case), cases.make_step(case).columns
    mask = (columns["token_mask"] * columns["sample_mask"][:, None])[:, 1:].bool()
    columns = columns | dict.fromkeys(("prev_logprobs", "generation_logprobs"), torch.zeros_like(columns["prev_logprobs"]))
    counts = columns["sample_mask"].sum(), mask.sum()
    for top_p, sampled, share in ((0.8, 0.0, 0.0), (0.8, -5e-4, 0.0), (0.8, -2e-3, 1.0), (1.0, -2e-3, None)):
        loss = nemo_rl.NemoLoss(cases.OwnLoss(given), nemo_rl.read(cases.master_config(given, top_p=top_p)), case.num_samples)
        batch = columns | {"generation_logprobs": columns["generation_logprobs"] + sampled}
        assert loss(torch.zeros(mask.shape, requires_grad=True), batch, *counts)[1].get(nemo_rl_loss.UNSCORED) == share


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
SCRIPT = """
import sys
import textwrap
sys.path.insert(0, {tests!r})
import nemo_rl_cases
from megatron_rl.hosts.choice import read_word
from nemo_rl.algorithms.grpo import setup
import nemo_rl.algorithms.grpo as trainer
words = [word.removeprefix("++loss_fn.").split("=") for word in sys.argv[1:]]
given = dict((name, read_word(text)) for name, text in words)
config = nemo_rl_cases.master_config(given)
loss = setup(config, "tokenizer")
print(type(loss).__name__, loss.launch, loss.samples_per_step)
print(type(trainer._create_advantage_estimator(config).compute_advantage).__name__)
"""

COMPOSER = """
class OverridesError(Exception): pass
def register_omegaconf_resolvers(): pass
def load_config(path):
    return {"path": path}
def parse_hydra_overrides(config, overrides):
    if not config["path"].endswith("run.yaml") or not overrides[0].startswith("++loss_fn."): raise OverridesError("no loss_fn")
    name, value = overrides[0].removeprefix("++loss_fn.").split("=")
    return {"loss_fn": {name: value}}
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "nemo_rl" / "algorithms"
    folder.mkdir(parents=True)
    for path in (folder.parent, folder):
        (path / "__init__.py").write_text("")
    (folder / "grpo.py").write_text(TRAINER)
    path = tmp_path / "run_grpo.py"
    path.write_text(SCRIPT.format(tests=str(cases.__file__.rsplit("/", 1)[0])))
    return path


def launched(script, *arguments: str) -> tuple[int | None, str, str]:
    return forked(lambda: launch.main([str(script), *arguments]))


@pytest.mark.parametrize(("aggregation", "kind"), [("prompt_mean", "function"), ("sample_mean", "method")])
def test_the_launcher_puts_our_loss_and_our_estimator_into_nemo_rl(script, aggregation, kind):
    code, out, error = launched(script, f"++loss_fn.megatron_rl=gspo.{aggregation}")
    assert code == 0, error
    assert out.split("\n")[:2] == [f"NemoLoss gspo.{aggregation} 16", kind]


def test_two_trainers_of_a_process_have_their_own_estimators(script):
    """Each is made after the setup of both."""
    text = script.read_text().partition("given = ")[0] + textwrap.dedent("""
        configs = [nemo_rl_cases.master_config({"megatron_rl": f"gspo.{name}"}) for name in ("prompt_mean", "sample_mean")]
        print(*(setup(config, "tokenizer").launch for config in configs))
        print(*(type(trainer._create_advantage_estimator(config).compute_advantage).__name__ for config in configs))
    """)
    script.write_text(text)
    code, out, error = launched(script)
    assert code == 0, error
    assert out.split("\n")[:2] == ["gspo.prompt_mean gspo.sample_mean", "function method"]


def test_the_launcher_ends_with_each_problem(script):
    line = ("++loss_fn.megatron_rl=grpo.prompt_mean", "++loss_fn.use_cispo=True", "++loss_fn.positive_example_nll_weight=1")
    code, out, error = launched(script, *line)
    assert (code, out) == (2, "")
    assert "two losses in one launch" in error and "weight depends on the micro-batch size" in error and "Traceback" not in error


def test_a_check_ends_in_setup_before_a_worker_is_made(script, monkeypatch):
    monkeypatch.setenv("MEGATRON_RL_CHECK", "1")
    code, out, error = launched(script, "++loss_fn.megatron_rl=gspo.token_mean")
    assert (code, out) == (0, "") and "megatron_rl=gspo.token_mean in NeMo-RL" in error and "ends here" in error
    code, out, error = launched(script, "++loss_fn.megatron_rl=gspo.nothing")
    assert (code, out) == (2, "") and "gspo.nothing does not name a loss and an aggregation" in error


def test_a_line_is_composed_by_nemo_rls_own_functions(script, monkeypatch):
    (script.parent / "nemo_rl" / "utils").mkdir()
    (script.parent / "nemo_rl" / "utils" / "__init__.py").write_text("")
    (script.parent / "nemo_rl" / "utils" / "config.py").write_text(COMPOSER)
    (script.parent / "omegaconf.py").write_text(
        "class OmegaConf:\n    to_container = staticmethod(lambda config, resolve: config)\n"
    )
    monkeypatch.syspath_prepend(str(script.parent))

    def work() -> None:
        line = ["-m", "megatron_rl.hosts.launch", str(script), "--config", "run.yaml", "++loss_fn.megatron_rl=gspo.token_mean"]
        assert nemo_rl.check(nemo_rl.compose(line)) == [
            "megatron_rl=gspo.token_mean in NeMo-RL, clip 0.0003/0.0004 (the loss's own clip)"
        ]
        with pytest.raises(ConfigError, match="NeMo-RL's own reader refuses the line: no loss_fn"):
            nemo_rl.compose([str(script), "loss_fn.megatron_rl=gspo.token_mean"])

    in_fork(work)


@pytest.mark.parametrize(
    ("loss_fn", "generation", "message"),
    [
        ({}, {}, None),
        ({"megatron_rl": "gspo.token_mean"}, {}, "top_p=0.8 beside the policy loss gspo, whose ratio is of more than one token"),
        ({"megatron_rl": "gspo_token.token_mean"}, {}, "top_p=0.8 beside the policy loss gspo_token, whose ratio is of more than"),
        ({"megatron_rl": "gspo.token_mean"}, {"top_p": 1.0}, None),
        ({"megatron_rl_importance_correction": "tis"}, {}, "top_p=0.8 beside importance_correction=tis"),
        ({"megatron_rl_kl_estimator": "unbiased"}, {}, "top_p=0.8 beside .*kl_estimator=unbiased"),
        ({}, {"vllm_cfg": {"logprobs_mode": "raw_logprobs"}}, "raw_logprobs.* such a token cannot be told from a sure one"),
        ({}, {"backend": "sglang"}, "sglang .*such a token cannot be told from a sure one"),
        ({}, {"backend": "megatron"}, None),
    ],
)
def test_what_reads_or_mixes_scores_is_refused_where_the_trainer_leaves_tokens_out(loss_fn, generation, message):
    """FB-161"""
    config = cases.master_config({"megatron_rl": "grpo.token_mean"} | loss_fn, top_p=0.8)
    config.policy["generation"] |= generation
    if message is None:
        assert nemo_rl.read(config)
        return
    with pytest.raises(ConfigError, match=message):
        nemo_rl.read(config)


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
    if has_mask:
        assert launch("gspo", megatron_rl_importance_correction="tis")
    else:
        with pytest.raises(ConfigError, match="the policy loss gspo"):
            launch("gspo")
    with pytest.raises(ConfigError, match="a ratio among the sets" if has_mask else "counts as a sure one"):
        launch(megatron_rl_kl_estimator="unbiased")


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("run_grpo.py", "algorithms.grpo import setup", "algorithms.ppo import setup", "does not import nemo_rl.algorithms.grpo"),
        ("run_grpo.py", "loss = setup", "sys.exit(0)\nloss = setup", None),
    ],
)
def test_another_trainer_is_refused(script, file, old, new, message):
    path = script.parent / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    code, out, error = launched(script, "++loss_fn.megatron_rl=gspo.sample_mean")
    if message is None:  # the script's own exit code
        assert code == 0
        return
    assert (code, out) == (2, "")
    assert re.search(message, error), error


# NeMo-RL's own code


def load_nemo_rl(cp_group, output_of=None, temperature=1.0):
    """(its ClippedPGLossFn by settings, a call through its LossPostProcessor). For a rank that ends with the test: an index that
    NeMo-RL's gather sends to the GPU stays on the CPU.

    output_of: what the model gives for these rows; the call is then NeMo-RL's forward step, with a temperature."""
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
        packing = {"enabled": case.packing != "rows", "fuse_loss": case.packing == "one call"}
        processor = train.LossPostProcessor(loss_fn=loss, cfg={"sequence_packing": packing}, num_microbatches=num_microbatches)
        logits = [logits_of(values, ids) for values, ids in zip(rows, data["input_ids"], strict=True)]
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
        if output_of is None:
            return processor(batch, packed, *counts)(output)
        given = SimpleNamespace(data_dict=batch, input_ids_cp_sharded=torch.zeros(1), packed_seq_params=packed, **nothing)
        found, process = train.forward_with_post_processing_fn(
            iter([given]),
            lambda **inputs: output_of(output),
            processor,
            global_valid_seqs=counts[0],
            global_valid_toks=counts[1],
            sampling_params=SimpleNamespace(temperature=temperature, top_k=None, top_p=1.0),
        )
        return process(found)

    def own(settings):
        return losses.ClippedPGLossFn(losses.ClippedPGLossConfig(**settings))

    return own, call


def errors_by_nemo_rl(rank: int, chosen: list[Case]) -> dict[str, float]:
    group = torch.distributed.group.WORLD
    own, call = load_nemo_rl(group)
    return {str(case): cases.error_of(case, call, own, group) for case in chosen}


@pytest.mark.host("NEMO_RL_ROOT")
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_nemo_rls_own_loss_path_is_exact_with_ours(cp):
    """Three losses, four aggregations, packings, dp and micro-batches, ragged groups, fully masked and dropped samples; real cp
    ranks, where NeMo-RL gathers the log-probabilities and always packs."""
    chosen = [case for case in cases.matrix(LOSSES) if case.cp == cp and (cp == 1 or case.packing != "rows")]
    for found in run_ranks(errors_by_nemo_rl, cp, chosen, timeout=500, use_megatron=False):
        assert len(found) == len(chosen) >= 24
        print(f"cp {cp}: worst {max(found.values()):.1e} of {len(found)}")
        assert not too_large(found)


def check_kl_by_nemo_rl(rank: int, case: Case) -> None:
    group = torch.distributed.group.WORLD
    own, call = load_nemo_rl(group)
    check_kl(case, "unbiased", own=own, call=call, cp_group=group)


@pytest.mark.host("NEMO_RL_ROOT")
@pytest.mark.parametrize("cp", [1, 2])
def test_nemo_rls_own_loss_path_is_exact_with_our_kl(cp):
    case = Case(loss="gspo", aggregation="token_mean", dp=2, cp=cp, sizes=(2, 5), packing="a call a sequence")
    run_ranks(check_kl_by_nemo_rl, cp, case, use_megatron=False)


@pytest.mark.host("NEMO_RL_ROOT")
def test_the_tokens_that_nemo_rls_own_filter_leaves_out_are_found():
    """FB-161: sampler and trainer keep by top-p 0.8, their logits differ in rounding; NeMo-RL's filter and mask make the scores."""

    def work() -> None:
        keep = NEMO_RL.load("nemo_rl.algorithms.logits_sampling_utils").apply_top_k_top_p
        mask_out = NEMO_RL.load("nemo_rl.algorithms.utils").mask_out_neg_inf_logprobs
        generator = torch.Generator().manual_seed(0)
        trainer = 4 * torch.randn(8, 500, 50, generator=generator)
        sampler = trainer + 0.05 * torch.randn(trainer.shape, generator=generator)
        of_sampler = keep(sampler, None, 0.8)[0].log_softmax(-1)
        taken = torch.multinomial(of_sampler.exp().flatten(0, 1), 1, generator=generator).view(8, 500, 1)
        sampled = of_sampler.gather(-1, taken)[..., 0]
        kept = keep(trainer, None, 0.8)[0].log_softmax(-1)
        scored, is_sure = kept.gather(-1, taken)[..., 0], kept.isfinite().sum(-1) == 1
        is_left_out, mask = scored.isinf(), torch.ones(8, 500)
        log_probs = mask_out(scored, mask, "curr_logprobs")
        given = cases.loss_settings(Case(loss="grpo", aggregation="token_mean"))
        loss = nemo_rl.NemoLoss(cases.OwnLoss(given), nemo_rl.read(cases.master_config(given, top_p=0.8)), 8)
        columns = [torch.nn.functional.pad(one, (1, 0)) for one in (log_probs, sampled)]
        data = dict(zip(("prev_logprobs", "generation_logprobs"), columns, strict=True))
        found = loss._unscored(log_probs, data, mask.bool())
        print(int(is_left_out.sum()), int(is_sure.sum()), int((found & ~is_left_out).sum()))
        assert is_left_out.any() and (is_sure & ~is_left_out).any()
        assert bool(found[is_left_out].all()), "each of them"
        others = found & ~is_left_out  # one token is left in the trainer's set, and more in the sampler's
        assert bool(is_sure[others].all()) and int(others.sum()) < int((is_sure & ~is_left_out).sum()) / 10

    out, _ = in_fork(work)


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
