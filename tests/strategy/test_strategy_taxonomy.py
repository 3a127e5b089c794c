"""Strategies and known systems are placed by their terms, and stand where the literature puts them."""
# ruff: noqa: E501  (tables read by rows)

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given

from shoal.api.taxonomy import taxonomy
from shoal.cli.explain import explain_strategy
from shoal.cli.taxonomy import print_taxonomy
from shoal.strategy import (
    REGISTRY,
    SPECTRUM,
    SYSTEMS,
    Strategy,
    check,
    explanation,
    in_words,
    parse,
    place,
    serial,
    systems_like,
    techniques,
)
from shoal.strategy.terms.via import ALL_REDUCE
from strategy.strategies import strategies

NAMED = (
    "DistBelief, Project Adam, Parameter Server, Petuum, Rudra, SINGA, MXNet, TensorFlow, CNTK, FireCaffe, Horovod, DDP, BigDL, "
    "SparkNet, EASGD, Gaia, D-PSGD, AD-PSGD, GPipe, PipeDream, Megatron, ZeRO, FlexFlow, Alpa, DiLoCo, LBANN, TorchGPipe, AxoNN, "
    "Mesh-TensorFlow, KARMA, ZeRO-Infinity, HOGWILD, PowerSGD, QSGD, TernGrad, Deep Gradient Compression, Sketched SGD, gs-SGD, "
    "MSTopK, BMUF, SGP, GShard, Switch, DeepSpeed-MoE, Ring Attention, Ulysses, Colossal-AI, torchtitan, FSDP, BytePS, 1-bit SGD, "
    "torchft, OpenDiLoCo, prime, hivemind, Psyche, Templar, SparseLoCo, MaxText DiLoCo, EXO Gym, NoLoCo, HALoS, Streaming DiLoCo, "
    "Decoupled DiLoCo, MuLoCo, DES-LOC, EDiT, DeMo, GASLoC, SlowMo, Asynchronous Local-SGD"
)


def test_the_systems_of_the_surveys_are_all_there() -> None:
    names = [system.name for system in SYSTEMS]
    missing = [wanted for wanted in NAMED.split(", ") if not any(wanted in name for name in names)]
    assert missing == []
    assert len(names) >= 35
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.name)
def test_every_system_is_a_legal_strategy_with_a_source(system) -> None:
    assert check(system.strategy) == ()
    assert system.source
    assert system.note
    assert 2010 < system.year < 2030


# By hand from the surveys: parallelism, optimisation, scheduling, communication, spectrum, class.
HYBRID_TENSOR = "hybrid: data + model horizontal (within layers)"
HYBRID_PIPELINE = "hybrid: data + model vertical (between layers)"
EXPECTED = {
    "DistBelief (Downpour SGD)": (
        HYBRID_TENSOR,
        "centralised",
        "asynchronous",
        "sharded PS",
        "asynchronous / HOGWILD",
        "hybrid: data + intra-layer",
    ),
    "Parameter Server": ("data", "centralised", "bounded asynchronous", "sharded PS", "stale-synchronous", "data"),
    "Petuum": ("data", "centralised", "bounded asynchronous", "co-located PS", "stale-synchronous", "data"),
    "Rudra": ("data", "centralised", "bounded asynchronous", "single PS", "backup workers / n-softsync", "data"),
    "TensorFlow (backup workers)": (
        "data",
        "centralised",
        "synchronous",
        "sharded PS",
        "backup workers / n-softsync",
        "data",
    ),
    "FireCaffe": ("data", "centralised", "synchronous", "tree", "synchronous", "data"),
    "Horovod": ("data", "centralised", "synchronous", "ring/butterfly", "synchronous", "data"),
    "BigDL": ("data", "centralised", "synchronous", "co-located PS", "synchronous", "data"),
    "SparkNet": ("data", "decentralised", "synchronous", "single PS", "model averaging / elastic averaging", "data"),
    "EASGD": ("data", "decentralised", "asynchronous", "single PS", "model averaging / elastic averaging", "data"),
    "D-PSGD": ("data", "decentralised", "synchronous", "gossip", "model averaging / elastic averaging", "data"),
    "AD-PSGD": ("data", "decentralised", "asynchronous", "gossip", "model averaging / elastic averaging", "data"),
    "NoLoCo": (
        HYBRID_PIPELINE,
        "decentralised",
        "synchronous",
        "gossip",
        "model averaging / elastic averaging",
        "hybrid: data + inter-layer",
    ),
    "SparseLoCo": (
        "data",
        "decentralised",
        "synchronous",
        "ring/butterfly",
        "model averaging / elastic averaging",
        "data",
    ),
    "HALoS": ("data", "centralised", "asynchronous", "single PS", "asynchronous / HOGWILD", "data"),
    "DeMo": ("data", "centralised", "synchronous", "ring/butterfly", "synchronous", "data"),
    "HOGWILD!": ("data", "centralised", "asynchronous", "shared memory", "asynchronous / HOGWILD", "data"),
    "GPipe": (
        "model vertical (between layers)",
        "centralised",
        "synchronous",
        "point-to-point",
        "synchronous",
        "inter-layer",
    ),
    "PipeDream": (
        HYBRID_PIPELINE,
        "centralised",
        "bounded asynchronous",
        "point-to-point",
        "stale-synchronous",
        "hybrid: data + inter-layer",
    ),
    "Megatron-LM": (
        HYBRID_TENSOR,
        "centralised",
        "synchronous",
        "ring/butterfly",
        "synchronous",
        "hybrid: data + intra-layer",
    ),
    "ZeRO (DeepSpeed)": ("data", "centralised", "synchronous", "ring/butterfly", "synchronous", "data"),
    "Distillation": ("data", "decentralised", "asynchronous", "none", "ensembles", "data"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_systems_stand_where_the_literature_puts_them(name: str) -> None:
    system = next(system for system in SYSTEMS if system.name == name)
    found = place(system.strategy)
    parallelism, optimisation, scheduling, communication, spectrum, comparison = EXPECTED[name]
    assert found.parallelism == parallelism
    assert found.optimisation == optimisation
    assert found.scheduling == scheduling
    assert found.communication.split(" + ")[0] == communication
    assert found.spectrum == spectrum
    assert found.comparison == comparison


def test_the_serial_run_has_a_place_too() -> None:
    found = place(serial)
    assert (found.parallelism, found.communication, found.comparison) == ("none", "none", "serial")


@pytest.mark.long
@given(strategies())
def test_every_strategy_can_be_placed_and_explained(strategy: Strategy) -> None:
    found = place(strategy)
    assert found.spectrum in SPECTRUM
    told = explanation(strategy)
    assert json.loads(json.dumps(told)) == told
    assert told["strategy"] == str(strategy)
    assert len(told["mesh"]["picture"]) <= 12
    assert len(in_words(strategy)) == max(len(strategy.terms), 1)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("dp(2)", "PyTorch DDP"),
        ("dp(3, zero=3)", "FSDP"),
        ("dp(8, zero=1) * tp(2)", "Megatron-LM distributed optimizer"),
        ('dp(6, sync=gossip("ring"))', "D-PSGD"),
        ('pp(2, "pipedream") * dp(4)', "PipeDream"),
        ("dp(2, compress=powersgd(4))", "PowerSGD"),
    ],
)
def test_a_strategy_finds_the_systems_that_train_this_way(text: str, name: str) -> None:
    likes = systems_like(parse(text))
    assert name in [like.system.name for like in likes]
    assert all(like.same for like in likes)


def test_a_strategy_of_its_own_kind_finds_its_neighbours() -> None:
    likes = systems_like(parse("dp(4, sync=diloco(50)) * pp(2) * dp(4, zero=3) * tp(2)"))
    assert 0 < len(likes) <= 5
    assert not any(like.same for like in likes)
    assert systems_like(serial) == ()


def test_the_table_of_techniques_holds_every_term() -> None:
    rows = techniques()
    assert set(REGISTRY) <= {row.name for row in rows}
    for row in rows:
        assert check(parse(row.example)) == (), row


def test_the_table_of_a_family_says_what_compressors_send_and_names_all_reduce_algorithms() -> None:
    compressors = [row for row in techniques("compress") if row.name != "none"]
    assert {row.name for row in compressors} == set(REGISTRY.of("compress")) - {"none"}
    assert all(row.detail.partition("; error: ")[0] for row in compressors)
    assert {f'allreduce "{name}"' for name in ALL_REDUCE} <= {row.name for row in techniques("via")}
    with pytest.raises(ValueError, match="expected one of axis, modifier, sync, via, compress"):
        print_taxonomy(family="compression")


@pytest.mark.processes
def test_reading_every_technique_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, shoal; from shoal.strategy.terms.via import ALL_REDUCE;"
        "assert not any(name.startswith('shoal.technique.') for name in sys.modules), 'read before it was asked for';"
        "assert len([*shoal.REGISTRY.values(), *ALL_REDUCE.values()]) > 40;"
        "print(sorted({'torch', 'numpy', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_the_mesh_is_drawn_with_the_last_axis_fastest() -> None:
    picture = explanation(parse("dp(2) * tp(3)"))["mesh"]["picture"]
    assert picture[0].split() == ["tp", "->"]
    assert [line.split() for line in picture[1:]] == [["dp", "0", "0", "1", "2"], ["dp", "1", "3", "4", "5"]]
    assert explanation(parse("dp(4, via=ps(2))"))["mesh"]["picture"][-1] == "servers: ranks 4 to 5"
    assert explanation(serial)["mesh"]["picture"] == ["rank 0"]


def test_explain_prints_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    explain_strategy("dp(8, zero=1) * tp(2)")
    out = capsys.readouterr().out
    for part in (
        "eighth",
        "16 ranks",
        "exact",
        "hybrid",
        "centralised",
        "synchronous",
        "intra-layer",
        "Megatron-LM",
    ):
        assert part in out
    explain_strategy("dp(8)", world=4)
    assert "8 ranks, 4 were given" in capsys.readouterr().out


def test_explain_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    explain_strategy("dp(4, sync=ssp(2))", as_json=True, world=8)
    told = json.loads(capsys.readouterr().out)
    assert told["contract"]["name"] == "bounded(2)"
    assert told["legal"] is False
    assert told["refusals"][0]["nearest"]


def test_the_taxonomy_prints_in_all_formats(capsys: pytest.CaptureFixture[str]) -> None:
    print_taxonomy("json")
    assert json.loads(capsys.readouterr().out) == taxonomy().to_json()
    print_taxonomy("markdown")
    markdown = capsys.readouterr().out
    assert all(f"| {system.name} |" in markdown for system in SYSTEMS)
    print_taxonomy("table")
    assert "Systems" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected"):
        print_taxonomy("yaml")  # type: ignore[arg-type]


def _timed(code: str, tmp_path: Path) -> tuple[float, str]:
    """The best of a few runs in a new process with compiled modules, in seconds, and what it printed."""
    source = Path(__file__).parents[2] / "src"
    environment = {"PYTHONPATH": str(source), "PYTHONPYCACHEPREFIX": str(tmp_path), "PATH": "/usr/bin:/bin"}
    seconds, out = [], ""
    for _ in range(5):
        start = time.perf_counter()
        out = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout
        seconds.append(time.perf_counter() - start)
    return min(seconds), out


@pytest.mark.processes
def test_explain_answers_at_once_and_loads_no_framework(tmp_path: Path) -> None:
    code = (
        "import sys; from shoal.cli.explain import explain_strategy; explain_strategy('dp(8, zero=1) * tp(2)');"
        "print(sorted({'torch', 'numpy', 'pydantic', 'transformers'} & set(sys.modules)))"
    )
    seconds, out = _timed(code, tmp_path)
    assert out.splitlines()[-1] == "[]"
    assert seconds < 0.4


@pytest.mark.processes
def test_the_algebra_imports_nothing_but_the_standard_library(tmp_path: Path) -> None:
    code = (
        "import sys; before = set(sys.modules); import shoal.strategy;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'org'}));"
        "print(sorted({name.split('.')[1] for name in sys.modules if name.startswith('shoal.')}))"
    )
    _, out = _timed(code, tmp_path)
    assert out.splitlines() == ["['shoal']", "['common', 'strategy']"]


@pytest.mark.processes
def test_importing_the_algebra_is_cheap(tmp_path: Path) -> None:
    code = "import time; start = time.perf_counter(); import shoal.strategy; print(time.perf_counter() - start)"
    runs = [float(_timed(code, tmp_path)[1]) for _ in range(2)]
    # Twice the budget of 40 ms: the machine that runs the tests may be busy.
    assert min(runs) < 0.08
