"""The table of GPUs: what is in it, what the driver's names lead to, and who joins whom."""

import re

import pytest

from vllm_k25_instrument.limits import gpus
from vllm_k25_instrument.limits.errors import LimitsError
from vllm_k25_instrument.limits.gpus import find_gpu, known_gpus, known_links
from vllm_k25_instrument.limits.model_shape import Math


@pytest.mark.parametrize(
    ("driver", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_auto_finds_what_the_driver_reports(driver, key):
    assert find_gpu("auto", installed=lambda: driver).key == key
    assert sum(re.search(gpu.match, driver, re.IGNORECASE) is not None for gpu in known_gpus().values()) == 1


@pytest.mark.parametrize("driver", ["NVIDIA H200 NVL", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA L40", "NVIDIA GB200"])
def test_a_relative_is_not_taken_for_the_gpu_it_resembles(driver):
    with pytest.raises(LimitsError, match=f"has a {driver}, which is not in the table"):
        find_gpu("auto", installed=lambda: driver)


def test_auto_without_a_gpu_says_that_nobody_reports_one(monkeypatch):
    monkeypatch.setattr(gpus, "_from_nvml", lambda: "")
    monkeypatch.setattr(gpus, "_from_torch", lambda: "")
    with pytest.raises(LimitsError, match=r"neither NVML .* nor torch reports a GPU here"):
        find_gpu("auto")


@pytest.mark.parametrize("name", ["RTX PRO 6000", "rtx_pro_6000", "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation"])
def test_a_name_may_be_written_as_people_write_it(name):
    assert find_gpu(name).key == "rtx-pro-6000"


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(LimitsError, match="--gpu h1000: not in the table; name one of"):
        find_gpu("h1000")


@pytest.mark.parametrize("gpu", known_gpus().values(), ids=lambda gpu: gpu.key)
def test_every_figure_is_plausible_and_has_a_source(gpu):
    assert gpu.source
    assert 0.5e12 < gpu.memory_bytes_per_second < 10e12
    assert 20e9 < gpu.memory_bytes < 300e9
    assert 50e12 < gpu.peak(Math.BF16) < 3000e12
    fp8 = gpu.flops_per_second.get(Math.FP8)
    # Tensor cores multiply twice as many numbers of half the width; rounding of data sheets apart.
    assert fp8 is None or fp8 / gpu.peak(Math.BF16) == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize(
    ("key", "tensor_cores", "fma_per_clock", "boost_ghz"),
    [
        ("rtx-pro-6000", 752, 128, 2.617),
        ("rtx-4090", 512, 64, 2.520),
        ("rtx-3090", 328, 64, 1.695),
        ("l40s", 568, 128, 2.490),
        ("a100-sxm", 432, 256, 1.410),
        ("h100-sxm", 528, 512, 1.830),
    ],
)
def test_bf16_rates_are_those_of_the_tensor_cores_without_sparsity(key, tensor_cores, fma_per_clock, boost_ghz):
    # One multiply-add is two operations.
    derived = tensor_cores * fma_per_clock * 2 * boost_ghz * 1e9
    assert known_gpus()[key].peak(Math.BF16) == pytest.approx(derived, rel=0.01)


@pytest.mark.parametrize(
    ("name", "gigatransfers", "lanes"), [("pcie4x16", 16, 16), ("pcie5x16", 32, 16), ("pcie5x8", 32, 8)]
)
def test_a_pcie_link_carries_128_of_130_bits(name, gigatransfers, lanes):
    assert known_links()[name].bytes_per_second == pytest.approx(gigatransfers * 1e9 * lanes * 128 / 130 / 8, rel=1e-4)


def test_eight_h100_are_joined_by_nvlink_and_eight_rtx_pro_6000_by_pcie():
    assert find_gpu("h100-sxm").link("auto", 8).name == "nvlink"
    assert find_gpu("h100-sxm").link("auto", 8).bytes_per_second == 450e9  # 900 GB/s are both directions
    assert find_gpu("rtx-pro-6000").link("auto", 8).name == "pcie5x16"


def test_a_bridge_joins_two_and_no_more():
    card = find_gpu("h100-pcie")
    assert card.link("auto", 2).name == "nvlink"
    assert card.link("auto", 8).name == "pcie5x16"
    with pytest.raises(LimitsError, match="joins 2 GPUs by it, the group has 8"):
        card.link("nvlink", 8)


def test_a_link_may_be_given_in_gigabytes_per_second_and_its_latency_in_microseconds():
    link = find_gpu("rtx-pro-6000").link("55.5", 8, hop_us=0.8)
    assert (link.bytes_per_second, link.hop_ns) == (55.5e9, 800)


@pytest.mark.parametrize("name", ["nvlink", "pcie9x16", "-1", "nan", "0"])
def test_a_link_that_the_gpu_lacks_is_refused_with_those_it_has(name):
    with pytest.raises(LimitsError, match=r"has no such link; known are auto, .*pcie5x16"):
        find_gpu("rtx-pro-6000").link(name, 8)
