"""A few hundred of the damaged files; `tests/fuzz/run.py --count 20000` makes more."""

import pytest

from tests.fuzz.run import fuzz


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_end_in_a_result_that_adds_up_or_in_one_clear_line(seed):
    outcome = fuzz(100, 777_000 + seed)
    assert outcome.problems == []
    assert outcome.counts["error"] > 0
    assert outcome.counts["incomplete"] > 0
