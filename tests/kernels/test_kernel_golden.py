"""The Triton kernels give the recorded outputs of the reference implementations (tests/data)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tpgrpo_fast import ops, transitions
from tpgrpo_fast.credit import CreditConfig, assign_credit

DATA = Path(__file__).parents[1] / "data"
STEPS = json.loads((DATA / "steps.json").read_text())
CREDIT = {
    "paper_constraint": CreditConfig(),
    "paper_constraint_balanced": CreditConfig(balance="batch", balance_by="global"),
    "paper_no_constraint": CreditConfig(consistent=False),
    "no_constraint_balanced": CreditConfig(consistent=False, balance="batch", balance_by="global"),
    "no_constraint_no_first": CreditConfig(consistent=False, first_step=False),
    "bonus_added_not_replacing": CreditConfig(turning="add"),
    "any_flip": CreditConfig(trend="any"),
    "positive_only": CreditConfig(positive_only=True),
}


def arrays(settings, device):
    """A recorded case's arrays under their short names."""
    prefix = f"{settings['case']}_"
    with np.load(DATA / "steps.npz") as stored:
        return {
            name.removeprefix(prefix): torch.from_numpy(stored[name]).to(device)
            for name in stored.files
            if name.startswith(prefix)
        }


@pytest.mark.parametrize("settings", STEPS, ids=[f"{s['case']}-{s['kind']}-{s['i']}" for s in STEPS])
def test_steps(device, settings):
    x = arrays(settings, device)
    transition = transitions.make(settings["kind"], settings["sigmas"], settings["i"], settings["noise_level"])
    step = ops.sde_step(x["v"], x["x"], transition, noise=x["eps"], return_mean=True, backend="triton")
    torch.testing.assert_close(step.mean, x["mean"], rtol=0, atol=1e-6)
    torch.testing.assert_close(step.next_sample, x["next"], rtol=0, atol=1e-6)
    tolerance = {"atol": 1e-9, "rtol": 1e-6} if settings["kind"] == "cps" else {"atol": 2e-6, "rtol": 0}
    torch.testing.assert_close(step.log_prob, x["logp"], **tolerance)
    score = ops.step_log_prob(x["v"], x["x"], x["next"], transition, backend="triton")
    torch.testing.assert_close(score, x["logp"], **tolerance)
    if "vnew" not in x:
        return
    velocity = x["vnew"].requires_grad_()
    loss = ops.grpo_loss(
        velocity, x["x"], x["next"], transition, x["logp"], x["adv"], velocity_ref=x["vref"],
        clip_range=settings["clip"], adv_clip=settings["adv_clip"], beta=settings["beta"], kl="flow_grpo",
        backend="triton",
    )  # fmt: skip
    assert loss.policy_loss.item() == pytest.approx(settings["policy_loss"], abs=3e-6)
    assert loss.kl.item() == pytest.approx(settings["kl_flow_grpo"], rel=1e-5)
    assert loss.loss.item() == pytest.approx(settings["loss"], abs=3e-6)
    loss.loss.backward()
    for actual, expected in zip(velocity.grad, x["grad"], strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4 * expected.abs().max().item())


def credit_cases(name):
    with np.load(DATA / "credit.npz") as stored:
        keys = [key for key in stored.files if key.partition("__")[2] == name]
        assert len(keys) > 8
        return [(stored[key.partition("__")[0] + "_R"], stored[key], key) for key in keys]


@pytest.mark.parametrize("name", CREDIT)
def test_step_rewards(device, name):
    for rewards, expected, key in credit_cases(name):
        rewards = torch.from_numpy(rewards).to(device)
        groups = torch.zeros(len(rewards), dtype=torch.int64)
        credit = assign_credit(rewards, groups, CREDIT[name], backend="triton")
        np.testing.assert_array_equal(credit.step_rewards.cpu(), expected, err_msg=key)


@pytest.mark.parametrize(("name", "normalize"), [("adv_group", "group"), ("adv_global", "batch_std")])
def test_advantages(device, name, normalize):
    for rewards, expected, key in credit_cases(name):
        groups = torch.arange(len(rewards)) % 2
        credit = assign_credit(
            torch.from_numpy(rewards).to(device), groups, CreditConfig(normalize=normalize), backend="triton"
        )
        np.testing.assert_allclose(credit.advantages.cpu(), expected, rtol=2e-7, atol=2e-7, err_msg=key)
