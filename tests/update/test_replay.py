"""The replay plan: every pair once, the same updates on any number of processes."""

import pytest
import torch

from tpgrpo_fast import replay


def plans(advantages, *, world_size=1, **changes):
    settings = {"updates": 2, "epochs": 1, "micro_batch": 5, "seed": 3, "iteration": 1, "skip_zero": True} | changes
    return [list(replay.plan(advantages, rank=r, world_size=world_size, **settings)) for r in range(world_size)]


def pairs_of(update, *, first_row=0):
    return [
        (int(row) + first_row, int(step))
        for batch in update.micro_batches
        if not batch.padding
        for row, step in zip(batch.rows, batch.steps, strict=True)
    ]


@pytest.fixture
def advantages():
    values = torch.randn(12, 4)
    values[torch.rand(12, 4) < 0.4] = 0.0
    return values


@pytest.mark.parametrize("updates", [1, 2, 5])
def test_each_epoch_trains_on_every_pair_once(advantages, updates):
    (plan,) = plans(advantages, updates=updates, epochs=2)
    assert len(plan) == 2 * updates
    wanted = sorted(map(tuple, advantages.nonzero().tolist()))
    for epoch in (plan[:updates], plan[updates:]):
        assert sorted(pair for update in epoch for pair in pairs_of(update)) == wanted
        assert sum(update.pairs for update in epoch) == advantages.numel()
        assert sum(update.trained for update in epoch) == len(wanted)
    if updates > 1:  # which rows an update holds is drawn anew in each epoch
        assert pairs_of(plan[0]) != pairs_of(plan[updates])


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 4, 100])
def test_processes_share_the_single_process_updates(advantages, world_size, micro_batch):
    (alone,) = plans(advantages)
    ranks = plans(advantages, world_size=world_size, micro_batch=micro_batch)
    share = 12 // world_size
    for place, update in enumerate(alone):
        together = [p for r, plan in enumerate(ranks) for p in pairs_of(plan[place], first_row=r * share)]
        assert sorted(together) == sorted(pairs_of(update))
        assert {plan[place].pairs for plan in ranks} == {update.pairs}
        assert len({len(plan[place].micro_batches) for plan in ranks}) == 1  # in step, whatever is skipped
        assert all(len(b.rows) <= micro_batch for plan in ranks for b in plan[place].micro_batches)


def test_zero_advantages_are_kept_on_request(advantages):
    (plan,) = plans(advantages, skip_zero=False)
    assert sum(update.trained for update in plan) == advantages.numel()
    (nothing,) = plans(torch.zeros(4, 2))
    assert all(update.micro_batches == () and update.pairs == 4 for update in nothing)


def test_order_is_a_function_of_seed_and_iteration(advantages):
    first, again = plans(advantages)[0], plans(advantages)[0]
    assert [pairs_of(u) for u in first] == [pairs_of(u) for u in again]
    for change in ({"seed": 4}, {"iteration": 2}):
        assert [pairs_of(u) for u in plans(advantages, **change)[0]] != [pairs_of(u) for u in first]
