"""Parameters and multiply-adds are those that were counted from the paper's layout."""

import pytest

from vir.models.catalog import PAPER, count

# Millions of parameters and billions of multiply-adds at 224 px, to the digits that were printed.
COUNTED = {
    "hvir_0": ("23.65", "3.16"),
    "hvir_1": ("39.09", "4.93"),
    "hvir_2": ("56.47", "8.22"),
    "hvir_3": ("112.58", "16.98"),
    "hvir_4": ("262.9", "39.6"),
    "vir_small_patch16_224": ("22.1", "4.2"),
    "vir_base_patch16_224": ("86.6", "16.9"),
    "vir_large_patch16_224": ("304.4", "59.7"),
    "vir_large_patch14_224": ("304.3", "77.8"),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts(name: str) -> None:
    params, gmacs = count(name)
    printed_params, printed_gmacs = COUNTED[name]
    assert f"{params:.{len(printed_params.split('.')[1])}f}" == printed_params
    assert gmacs == pytest.approx(float(printed_gmacs), abs=0.06)


def test_larger_images_cost_more_positions_and_more_work() -> None:
    params, gmacs = count("vir_large_patch14_224", 448)
    assert (round(params, 2), round(gmacs, 1)) == (305.09, 310.2)


@pytest.mark.parametrize("case", [case for case, printed in PAPER.items() if not printed.erratum], ids=str)
def test_the_paper_agrees_where_no_erratum_is_marked(case: tuple[str, int]) -> None:
    params, gmacs = count(*case)
    assert params == pytest.approx(PAPER[case].params, abs=0.11)
    assert gmacs == pytest.approx(PAPER[case].gmacs, abs=0.06)


@pytest.mark.parametrize("name", ["vir_tiny_patch16_224", "hvir_tiny"])
def test_our_small_ones_are_small(name: str) -> None:
    assert 4.5 < count(name)[0] < 6
