"""The seeds of the questions of other people's packages."""

from itertools import pairwise

from prompt_r1.tasks.packages import SEEDS_OF_A_SPLIT, SPLITS, split_of


def test_no_two_splits_of_any_two_seeds_share_a_seed():
    starts = sorted(split_of("task", split, seed, "").seed for split in SPLITS for seed in range(5))
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert min(gaps) >= SEEDS_OF_A_SPLIT
