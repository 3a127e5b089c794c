"""Impossible cluster files are refused in one sentence that names the file, whatever is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.cluster import BadCluster, read_cluster

LEVEL = "[[level]]\nranks = 8\ngb_per_s = 300\nlatency_us = 7\n"
NAMED = 'device = "A100 SXM4 80GB"\n'
OWN = "[device]\npeak_tflops = {bf16 = 300}\nmemory_gb = 80\nmemory_gb_s = 2000\n"


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "device = = 3",
        NAMED,
        LEVEL,
        NAMED + "level = 3\n",
        NAMED + "level = [3]\n",
        "device = [1]\n" + LEVEL,
        'device = "Z9000"\n' + LEVEL,
        "name = 3\n" + NAMED + LEVEL,
        "devices = 12\n" + NAMED + LEVEL,
        *("devices = " + each + "\n" + NAMED + LEVEL for each in ("inf", "nan", "1e400", "0", "2.5")),
        *(NAMED + changed(LEVEL, "ranks = 8", f"ranks = {each}") for each in ("inf", "nan", "0", "2.5", '"8"', "true")),
        *(NAMED + changed(LEVEL, "300", each) for each in ("inf", "nan", "0", "-3")),
        *(NAMED + changed(LEVEL, "= 7", f"= {each}") for each in ("inf", "nan", "-7")),
        NAMED + changed(LEVEL, "gb_per_s", "gb_per_sec"),
        *(
            OWN + line + "\n" + LEVEL
            for line in (
                "sms = nan",
                "sms = inf",
                "sms = 0",
                "domain = -3",
                "domain = nan",
                "watts = -3",
                "watts = nan",
                'watts = "much"',
            )
        ),
        *(changed(OWN, "memory_gb = 80", f"memory_gb = {each}") + LEVEL for each in ("0", "inf", "nan")),
        changed(OWN, "{bf16 = 300}", "{int4 = 300}") + LEVEL,
        changed(OWN, "{bf16 = 300}", "{}") + LEVEL,
    ],
)
def test_an_impossible_file_is_refused_in_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "impossible.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadCluster) as refused:
        read_cluster(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_device_of_the_users_own_may_state_its_power(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(OWN + "watts = 350\n" + LEVEL, encoding="utf-8")
    assert read_cluster(path).device.watts == 350
