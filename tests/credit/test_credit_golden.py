"""Credit equals what the reference implementation of TurningPoint-GRPO recorded (tests/data/credit.*)."""

import json
from pathlib import Path

import numpy as np
import pytest

from tpgrpo_fast.credit import CreditConfig, assign_credit

DATA = Path(__file__).parent.parent / "data"

# Recorded name -> CreditConfig. The reference's flags, with their values, are in credit.json:
#   select_first_step_only_from_consistent_trajectory, select_inter_step_only_from_consistent_trajectory -> consistent
#   apply_first_step_bonus -> first_step; indicator_wo_delta_global_constraint -> trend="any"
#   select_only_positive_intermediate_step -> positive_only; use_sde_minus_rt -> aggregated="from_state"
#   drop_original_reward_when_having_bonus -> turning="replace", else "add"; eta -> eta
#   use_balanced_bonus -> balance="batch", balance_by="global": it ranks by R_n - R_0 within the batch (here: the case)
CONFIGS = {
    "paper_constraint": CreditConfig(),
    "paper_constraint_balanced": CreditConfig(balance="batch", balance_by="global"),
    "paper_no_constraint": CreditConfig(consistent=False),
    "no_constraint_balanced": CreditConfig(consistent=False, balance="batch", balance_by="global"),
    "no_constraint_no_first": CreditConfig(consistent=False, first_step=False),
    "bonus_added_not_replacing": CreditConfig(turning="add"),
    "any_flip": CreditConfig(trend="any"),
    "positive_only": CreditConfig(positive_only=True),
}
ADVANTAGES = {"adv_group": CreditConfig(), "adv_global": CreditConfig(normalize="batch_std")}
CASES = 24
BALANCED_CASES = {"paper_constraint_balanced": 12, "no_constraint_balanced": 9}  # the others cut at a tie


@pytest.fixture(scope="module")
def recorded():
    with np.load(DATA / "credit.npz") as arrays:
        return dict(arrays)


def cases(recorded, name):
    """(rewards, recorded array, its key) of every case that has this recording."""
    keys = [key for key in recorded if key.partition("__")[2] == name]
    return [(recorded[key.partition("__")[0] + "_R"], recorded[key], key) for key in keys]


def test_every_recorded_configuration_is_mapped(recorded):
    flags = json.loads((DATA / "credit.json").read_text())["configs"]
    assert set(flags) == set(CONFIGS)
    names = {key.partition("__")[2].removesuffix("__bonus") for key in recorded if not key.endswith("_R")}
    assert names == set(CONFIGS) | set(ADVANTAGES)


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("name", CONFIGS)
def test_step_rewards(recorded, name, backend):
    found = cases(recorded, name)
    assert len(found) == BALANCED_CASES.get(name, CASES)
    for rewards, expected, key in found:
        credit = assign_credit(rewards, np.zeros(len(rewards), int), CONFIGS[name], backend=backend)
        np.testing.assert_array_equal(credit.step_rewards, expected, err_msg=key)
        bonus = np.where(credit.turning_points, credit.aggregated, 0)
        np.testing.assert_array_equal(bonus, recorded[key + "__bonus"], err_msg=key)


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(recorded, name, backend):
    found = cases(recorded, name)
    assert len(found) == CASES
    for rewards, expected, key in found:
        groups = np.arange(len(rewards)) % 2
        credit = assign_credit(rewards, groups, ADVANTAGES[name], backend=backend)
        np.testing.assert_allclose(credit.advantages, expected, rtol=2e-7, atol=2e-7, err_msg=key)
