"""Transitions, log-probs, loss and gradient equal the recorded outputs of the reference implementations.

`tests/data/steps.npz` holds float32 results on random inputs, `steps.json` the grid, step and noise level of each case.
The tolerances are a few float32 roundings of the values compared.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tpgrpo_fast import ops, transitions

DATA = Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "steps.json").read_text())
NAMES = [f"{case['case']}-{case['kind']}-{case['i']}" for case in CASES]


@pytest.fixture(scope="module")
def arrays():
    with np.load(DATA / "steps.npz") as stored:
        return {name: torch.from_numpy(stored[name]) for name in stored.files}


@pytest.fixture(params=CASES, ids=NAMES)
def case(request, arrays):
    """One recorded case: its settings and, under their short names, its arrays."""
    settings = request.param
    prefix = f"{settings['case']}_"
    return settings | {f"t_{k.removeprefix(prefix)}": v for k, v in arrays.items() if k.startswith(prefix)}


def transition_of(case):
    return transitions.make(case["kind"], case["sigmas"], case["i"], case["noise_level"])


def close(actual, expected, *, atol, rtol=0.0):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def test_the_recording_covers_every_sampler_at_first_middle_and_last_step():
    assert {(case["kind"], case["i"]) for case in CASES} == {
        (kind, step) for kind in ("ode", "sde", "cps", "dance") for step in (0, 1, 5, 8, 9)
    }


def test_std_mean_state_and_log_prob(case):
    transition = transition_of(case)
    assert transition.c == pytest.approx(case["std"], rel=1e-6, abs=0.0)
    result = ops.sde_step(case["t_v"], case["t_x"], transition, noise=case["t_eps"], return_mean=True)
    close(result.mean, case["t_mean"], atol=1e-6)
    close(result.next_sample, case["t_next"], atol=1e-6)
    # Flow-CPS's log-probs without variance are as small as 1e-5 near the image, hence a relative bound as well.
    if case["kind"] == "cps":
        close(result.log_prob, case["t_logp"], atol=1e-9, rtol=1e-6)
    else:
        close(result.log_prob, case["t_logp"], atol=2e-6)


def test_log_prob_of_the_recorded_state(case):
    actual = ops.step_log_prob(case["t_v"], case["t_x"], case["t_next"], transition_of(case))
    atol, rtol = (1e-9, 1e-6) if case["kind"] == "cps" else (2e-6, 0.0)
    close(actual, case["t_logp"], atol=atol, rtol=rtol)


def test_a_batch_of_all_steps_in_one_call_equals_the_recording(arrays):
    # Rows at five different steps share one launch; only their coefficients differ.
    for kind in ("sde", "cps", "dance", "ode"):
        cases = [case for case in CASES if case["kind"] == kind]
        stacked = {k: torch.cat([arrays[f"{c['case']}_{k}"] for c in cases]) for k in ("v", "x", "eps", "next", "logp")}
        steps = torch.tensor([c["i"] for c in cases]).repeat_interleave(3)
        transition = transitions.make(kind, cases[0]["sigmas"], steps, cases[0]["noise_level"])
        result = ops.sde_step(stacked["v"], stacked["x"], transition, noise=stacked["eps"])
        close(result.next_sample, stacked["next"], atol=1e-6)
        close(result.log_prob, stacked["logp"], atol=2e-6)


@pytest.fixture(params=[case for case in CASES if case["kind"] == "sde"], ids=[n for n in NAMES if "sde" in n])
def loss_case(request, arrays):
    settings = request.param
    prefix = f"{settings['case']}_"
    return settings | {f"t_{k.removeprefix(prefix)}": v for k, v in arrays.items() if k.startswith(prefix)}


def golden_loss(case, velocity, **changes):
    arguments = {
        "velocity_ref": case["t_vref"],
        "clip_range": case["clip"],
        "adv_clip": case["adv_clip"],
        "beta": case["beta"],
        "kl": "flow_grpo",
    } | changes
    return ops.grpo_loss(
        velocity, case["t_x"], case["t_next"], transition_of(case), case["t_logp"], case["t_adv"], **arguments
    )


def test_loss_and_its_parts(loss_case):
    result = golden_loss(loss_case, loss_case["t_vnew"])
    # exp(new - old) turns a rounding of a log-prob of size 4 into about 5e-7 of the ratio.
    assert result.policy_loss.item() == pytest.approx(loss_case["policy_loss"], abs=3e-6)
    # Near the image the recorded difference of two close float32 means is itself off by 1.3e-5.
    assert result.kl.item() == pytest.approx(loss_case["kl_flow_grpo"], rel=2e-5)
    assert result.loss.item() == pytest.approx(loss_case["loss"], abs=3e-6)


def test_gradient_row_by_row(loss_case):
    velocity = loss_case["t_vnew"].clone().requires_grad_()
    golden_loss(loss_case, velocity).loss.backward()
    # Clipped rows carry the KL's gradient alone, down to 1e-11: compare each row on its own scale. Near the image the
    # difference of two close means is good to four digits or so in float32.
    for row, (actual, expected) in enumerate(zip(velocity.grad, loss_case["t_grad"], strict=True)):
        scale = expected.abs().max().item()
        assert scale > 0, row
        close(actual, expected, atol=2e-4 * scale)


def test_the_recording_tells_clipped_rows_and_kl_conventions_apart(loss_case):
    # Guards the two tests above: without the clip, or with the other KL, they would not pass.
    recorded = golden_loss(loss_case, loss_case["t_vnew"])
    assert recorded.clip_fraction > 0
    unclipped = golden_loss(loss_case, loss_case["t_vnew"], clip_range=10.0)
    assert abs(unclipped.policy_loss.item() - loss_case["policy_loss"]) > 1e-5
    gaussian = golden_loss(loss_case, loss_case["t_vnew"], kl="gaussian")
    sigmas, step = loss_case["sigmas"], loss_case["i"]
    assert gaussian.kl.item() * (sigmas[step] - sigmas[step + 1]) == pytest.approx(recorded.kl.item(), rel=1e-5)
