"""What the gate must see: faults behind zeros, optimisers, buffers, compressed and plain dp; and what it must say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shoal
from shoal.job import JobError, load_file
from shoal.job.facts import build_without_memory
from shoal.layout.layout import facts_of, layout_of
from shoal.parallel.recompute import recompute_blocks
from shoal.proof.certify import verify
from shoal.proof.fingerprint import OWN_ROOMS, fingerprint
from shoal.proof.gate import LayoutWrong, require_right
from shoal.proof.gate_model import gate_model
from shoal.proof.gate_question import question
from shoal.proof.gate_serial import serial_steps
from shoal.proof.proven import is_proven, proven_file, remember, secret_file
from shoal.runtime.float64 import model_in_float64
from shoal.strategy import parse
from shoal.training.local import train_job
from shoal.training.record.run import Run
from shoal.training.resumed import CannotTrain

HEAD = """
import types
import torch
import torch.nn.functional as F
from torch import nn
from shoal.job import Job, TensorData

ARGS = types.SimpleNamespace(scale={scale}, nested=types.SimpleNamespace(power=2.0))
{helpers}

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.args = ARGS
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("constant", torch.full((4,), {constant}))
        {init}

    def forward(self, x):
        h = torch.tanh(self.up(x)) * self.args.scale * self.constant.sum()
        {inside}
        return x + self.down(h)

def loss(output, batch):
    return {loss}, {count}

data = torch.randn(48, {seq} 8, generator=torch.Generator().manual_seed(3))
{data}
job = Job(
    name="reach", model={model}, train={train}, loss=loss,
    optimizer=lambda groups: {optimizer}, global_batch=12, steps=2, {more}
)
"""
DEFAULTS = {
    "scale": "1.0",
    "helpers": "",
    "constant": "0.25",
    "init": "pass",
    "inside": "pass",
    "seq": "",
    "loss": '((output - batch["y"]) ** 2).sum()',
    "count": "len(output)",
    "data": "",
    "model": "lambda: nn.Sequential(Block(), Block(), nn.Linear(8, 8))",
    "train": "TensorData(x=data, y=data.flip(-1))",
    "optimizer": "torch.optim.AdamW(groups, lr=0.01)",
    "more": "",
}

# A branch behind two zeros reads what another stage left in a global: at the start, no gradient shows it.
HIDDEN = {
    "helpers": """
NOTES = {}

def numbered(number):
    block = Block()
    block.number = number
    return block
""",
    "init": "self.gain, self.inner = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))",
    "inside": """note = NOTES.get(self.number - 1)
        NOTES[self.number] = x.detach().double().numpy()
        if note is not None and note.shape == x.shape:
            x = x + self.gain * self.inner * torch.from_numpy(note).to(x.dtype)""",
    "model": "lambda: nn.Sequential(*(numbered(number) for number in range(4)))",
}
EMA = {
    "init": """self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))""",
    "inside": """if self.training:
            with torch.no_grad():
                self.seen.lerp_(x.mean(0).to(self.seen.dtype), 0.1)
                self.rows += len(x)""",
}
DECLARED = "buffers={'*.seen': 'average', '*.rows': 'sum'},"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def written(**changes: str) -> str:
        path = tmp_path / "reach.py"
        path.write_text(HEAD.format(**{**DEFAULTS, **changes}), encoding="utf-8")
        return str(path)

    return written


def train(job: str, strategy: str, tmp_path: Path, **options: Any) -> tuple[Run, list[str]]:
    said: list[str] = []
    run = train_job(
        job,
        strategy,
        folder=tmp_path / f"run-{len(list(tmp_path.glob('run-*')))}",
        on_message=lambda message: said.append(message["text"]) if "text" in message else None,
        checkpoint_every=0,
        **options,
    )
    return run, said


def stopped(job: str, strategy: str, tmp_path: Path, kind: type[Exception] = LayoutWrong) -> str:
    with pytest.raises(kind) as refused:
        train(job, strategy, tmp_path)
    assert not proven_file().exists()
    assert not list(tmp_path.glob("run-*")), "nothing was trained"
    return str(refused.value)


@pytest.mark.processes
def test_a_fault_behind_a_parameter_that_starts_at_zero_is_seen(write: Callable[..., str], tmp_path: Path) -> None:
    told = stopped(write(**HIDDEN), "pp(2, micro=1)", tmp_path)
    assert "the layout inferred for this model is wrong: under pp(2, micro=1), the " in told


def test_perturbed_parameters_keep_their_signs_and_leave_no_zero(write: Callable[..., str]) -> None:
    job = load_file(write(init="self.gain = nn.Parameter(torch.zeros(8))"))
    build = gate_model(job)
    torch.manual_seed(0)
    one = dict(build().named_parameters())
    torch.manual_seed(0)
    plain = dict(job.model().named_parameters())
    two = dict(build().named_parameters())
    for name, param in one.items():
        assert torch.equal(param, two[name]), "built twice, the same"
        assert (param != 0).all()
        old = plain[name]
        assert (torch.sign(param) == torch.sign(old))[old != 0].all()
        assert ((param - old).abs() <= 0.11 * old.abs() + 0.11)[old != 0].all()


OPTIMIZERS = """
class OverAll(torch.optim.Optimizer):
    "Divides by the norm over all the parameters it was given."
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        size = sum(p.grad.square().sum() for p in every).sqrt() + 1e-12
        if sum(p.numel() for p in every) > 100 and every[0].dim() < 3:
            size = size * (1 + len(every))
        for p in every:
            p.sub_(p.grad / size, alpha=self.param_groups[0]["lr"])
"""


@pytest.mark.processes
def test_an_optimiser_that_the_probe_takes_for_element_wise_is_stopped_by_name(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write(
        helpers=OPTIMIZERS, optimizer="OverAll(groups, lr=0.01)", more="facts=FACTS,", data=DECLARES_ELEMENTWISE
    )
    told = stopped(job, "dp(2, zero=1)", tmp_path, (LayoutWrong, CannotTrain))  # type: ignore[arg-type]
    assert "OverAll" in told or "element" in told


DRAWS = """
class Langevin(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=0.01)
"""


@pytest.mark.parametrize("optimizer", ["Langevin(groups, lr=0.01)", "torch.optim.LBFGS(groups, lr=0.1, max_iter=2)"])
def test_optimisers_whose_updates_cannot_be_compared_are_checked_by_their_gradients(
    optimizer: str, write: Callable[..., str]
) -> None:
    job = load_file(write(helpers=DRAWS, optimizer=optimizer))
    strategy = parse("dp(2)")
    asked = question(job, strategy, facts_of(job, layout_of(job, strategy)))
    assert asked is not None
    assert asked["updates"] is False
    model = model_in_float64(job.model())
    assert (
        serial_steps(job, strategy, model, has_state=False, steps=1).gradients.keys()
        == dict(model.named_parameters()).keys()
    )


DECLARES_ELEMENTWISE = "from shoal.strategy import ModelFacts; FACTS = ModelFacts(elementwise_optimizer=True)"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loss": '((output - batch["y"]) ** 2).mean()'}, "the loss is a mean, not a sum"),
        ({"count": "3"}, "the count is wrong"),
        ({"inside": "h = h - h.mean(0)"}, "the model couples samples"),
        ({"loss": "(output @ output.T).logsumexp(1).sum()"}, "the loss couples samples"),
    ],
)
def test_what_must_not_be_split_is_refused_by_name_before_the_first_step(
    changes: dict[str, str], why: str, write: Callable[..., str], tmp_path: Path
) -> None:
    told = stopped(write(**changes), "dp(2)", tmp_path, CannotTrain)
    assert told.startswith(f"dp(2) splits the batch, but job 'reach': {why}")


@pytest.mark.processes
def test_random_data_are_named_and_not_the_layout(write: Callable[..., str], tmp_path: Path) -> None:
    noisy = """
class Noisy:
    def __len__(self): return 48
    def batch(self, indices):
        x = data[torch.as_tensor(indices)]
        return {"x": x + 0.1 * torch.randn_like(x), "y": x}
"""
    job = write(data=noisy, train="Noisy()")
    told = stopped(job, "pp(2, micro=1)", tmp_path, CannotTrain)
    assert "two reads of sample " in told
    assert "differ in its entry 'x'; Data.batch must be a pure function of the indices" in told
    run, said = train(job, "dp(2)", tmp_path)
    assert run.status == "finished"
    assert said[0].startswith("the strategy was not checked: two reads of sample ")


@pytest.mark.processes
def test_data_that_each_process_makes_anew_are_named(write: Callable[..., str], tmp_path: Path) -> None:
    job = write(data="import os; data = data + os.getpid() % 1000 / 1000")
    told = stopped(job, "pp(2, micro=1)", tmp_path)
    assert "rank 1 reads other values than rank 0 for the same samples" in told


@pytest.mark.processes
def test_a_compiled_model_is_refused_by_axes_that_cut_it_and_taken_by_dp(
    write: Callable[..., str], tmp_path: Path
) -> None:
    job = write(model="lambda: torch.compile(nn.Sequential(Block(), Block()), backend='eager')")
    assert stopped(job, "tp(2)", tmp_path, CannotTrain) == (
        "the model is compiled (all of it: torch.compile), and tp must call its modules one by one, which compiled "
        "code does not; let Job.model return it uncompiled, or leave tp out"
    )
    for strategy, part in (("dp(2, zero=3)", "zero=3"), ("dp(2) * recompute('full')", "recompute")):
        assert f"and {part} must call its modules one by one" in stopped(job, strategy, tmp_path, CannotTrain)
        with pytest.raises(CannotTrain, match=f"or leave {part} out"):
            train_job(job, strategy, folder=tmp_path / "ungated", gate=False)
    run, said = train(job, "dp(2)", tmp_path)
    assert run.status == "finished"
    assert said == ["checking the strategy, once: two steps in float64 under dp(2)"]


@pytest.mark.processes
def test_a_compiled_model_is_proven_uncompiled_and_the_certificate_notes_it(write: Callable[..., str]) -> None:
    refused = "lambda graph, inputs: 1 / 0"
    job = write(model=f"lambda: torch.compile(nn.Sequential(Block(), Block()), backend={refused})")
    certificate = verify(job, parse("dp(2)"), steps=2)
    assert certificate.passed
    assert "the model is compiled (all of it: torch.compile); both runs executed it uncompiled" in certificate.notes


@pytest.mark.processes
def test_replicas_that_compute_something_else_are_stopped_under_plain_dp(
    write: Callable[..., str], tmp_path: Path
) -> None:
    by_rank = "h = h * (1 + 0.1 * (torch.distributed.get_rank() if torch.distributed.is_initialized() else 0))"
    told = stopped(write(inside=by_rank), "dp(2)", tmp_path)
    assert told.startswith("dp(2) trains another model than one process does: the ")


def test_a_loss_that_is_no_number_is_called_that() -> None:
    question = {"strategy": "tp(2)", "axes": ["tp"], "key": "k", "job": "j", "optimizer": "SGD"}
    found = {"skip": "", "difference": "nan", "kind": "loss", "where": "the loss of step 1", "buffers": []}
    found |= {"wrong": True, "tolerance": 1e-8}
    with pytest.raises(
        LayoutWrong, match="the loss of step 1 is NaN or infinite, where that of a serial step is finite"
    ):
        require_right(found, question, lambda message: None)


@pytest.mark.processes
def test_a_serial_loss_that_is_no_number_is_said_to_be_so(write: Callable[..., str], tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(Exception, match="the loss is nan"):
        train_job(
            write(inside="h = h * float('nan')"),
            "dp(2)",
            folder=tmp_path / "run",
            checkpoint_every=0,
            on_message=lambda message: said.append(message["text"]) if "text" in message else None,
        )
    assert said[-1] == ("the strategy was not checked: the loss of step 1 is nan in a serial run in float64 already")


# State in an attribute is no random number: it must be checked, and named.
HIDDEN_STATE = {
    "init": "self.seen = torch.zeros(8)",
    "inside": """h = h + self.seen.mean().to(h.dtype)
        if self.training:
            self.seen = 0.9 * self.seen + x.detach().mean(0)""",
}
NOISE = {"inside": "h = h + torch.randn_like(h)"}
OUTSIDE = {
    "helpers": """
class Reaching(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + self.blocks[0].down.bias
""",
    "model": "lambda: Reaching()",
}
FOLLOWING = {
    "helpers": """
class Following(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("mean", torch.zeros_like(self.blocks[0].down.bias))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            self.mean.lerp_(self.blocks[0].down.bias, 0.1)
        return x
""",
    "model": "lambda: Following()",
}
UNREPEATABLE = {
    "helpers": """
class Widening(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)
        self.widths = iter(range(10**9))

    def forward(self, x):
        return super().forward(x) + torch.tanh(x.new_ones(len(x), next(self.widths) + 1).requires_grad_()).mean()
""",
    "model": "lambda: nn.Sequential(nn.Linear(8, 8), Widening(), Widening())",
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "strategy", "sentence"),
    [
        (HIDDEN_STATE, "dp(2)", "A forward changes 0.seen, which is no buffer, so each replica keeps its own"),
        (
            OUTSIDE,
            "dp(2, zero=3)",
            "dp(2, zero=3): the model reads the parameter blocks.0.down.bias outside of the "
            "forward of the block that it belongs to, where zero=3 has not gathered it",
        ),
        (FOLLOWING, "dp(2, zero=3)", "the model reads the parameter blocks.0.down.bias outside of the forward"),
    ],
)
def test_what_replicas_do_not_share_is_named(
    changes: dict[str, str], strategy: str, sentence: str, write: Callable[..., str], tmp_path: Path
) -> None:
    assert sentence in stopped(write(**changes), strategy, tmp_path)


@pytest.mark.processes
def test_blocks_that_cannot_be_repeated_are_refused_on_one_rank(write: Callable[..., str], tmp_path: Path) -> None:
    told = stopped(write(**UNREPEATABLE), 'recompute("full")', tmp_path, CannotTrain)
    assert 'the model runs in one process but fails under recompute("full")' in told
    assert "Leave recompute out, or let blocks make new tensors" in told


@pytest.mark.processes
def test_noise_in_forward_is_checked(write: Callable[..., str], tmp_path: Path) -> None:
    _, said = train(write(**NOISE), "dp(2)", tmp_path)
    assert len(json.loads(proven_file().read_text())["proven"]) == 1, said


def test_recomputation_switches_a_key_value_cache_off() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model.config = SimpleNamespace(use_cache=True)  # type: ignore[assignment]
    recompute_blocks(model, "full")
    assert model.config.use_cache is False  # type: ignore[union-attr]


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["dp(2, compress=powersgd(2))", "dp(2, compress=topk(0.1)) * tp(2)"])
def test_strategies_that_compress_are_checked_too(strategy: str, write: Callable[..., str], tmp_path: Path) -> None:
    _, said = train(write(), strategy, tmp_path)
    assert said[0].startswith("checking the ")
    assert len(json.loads(proven_file().read_text())["proven"]) == 1


# Buffers that replicas update from their own share


@pytest.mark.processes
def test_an_undeclared_buffer_that_replicas_update_is_refused_by_name(
    write: Callable[..., str], tmp_path: Path
) -> None:
    told = stopped(write(**EMA), "dp(2)", tmp_path)
    assert told.startswith("under dp(2), the buffer 0.")
    assert "declare what replicas do with it: Job(buffers={'0." in told


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["dp(2)", "dp(3)", "dp(2, zero=3)", "pp(2) * dp(2)", "dp(2) * accumulate(2)"])
def test_declared_buffers_are_those_of_one_process(strategy: str, write: Callable[..., str], tmp_path: Path) -> None:
    _, said = train(write(**EMA, more=DECLARED), strategy, tmp_path)
    said = [text for text in said if not text.startswith("per micro-batch")]
    assert len(said) == 1
    assert said[0].startswith("checking the ")
    [entry] = json.loads(proven_file().read_text())["proven"].values()
    assert entry["difference"] < 1e-10


@pytest.mark.processes
def test_local_and_broadcast_buffers_are_left_to_the_replicas(write: Callable[..., str], tmp_path: Path) -> None:
    run, said = train(write(**EMA, more="buffers={'*.seen': 'broadcast', '*.rows': 'local'},"), "dp(2)", tmp_path)
    assert run.status == "finished"
    assert len(said) == 1
    counted = {(key.kind, key.phase) for key in run.ledger.entries}
    assert ("broadcast", "optimizer") in counted


@pytest.mark.processes
def test_a_declaration_that_fits_no_buffer_is_refused(write: Callable[..., str], tmp_path: Path) -> None:
    told = stopped(write(**EMA, more="buffers={'*.sen': 'average'},"), "dp(2)", tmp_path, CannotTrain)
    assert "buffers names '*.sen', but no buffer of the model matches; its buffers: 0.constant, 0.rows" in told
    with pytest.raises(JobError, match="buffers has 'mean' for"):
        load_file(write(more="buffers='mean',"))


# What a pass is remembered by


OWN_GRADIENT = """
class Times:
    def __init__(self, by):
        self.by = by

    def __call__(self, g):
        return g * self.by

class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

def later(ctx, g):
    return {later}

Own.backward = staticmethod(later)
"""


def key_of(job_file: str, strategy: str = "dp(2)", **changes: Any) -> str:
    job = replace(load_file(job_file), **changes)
    return fingerprint(job, build_without_memory(job), parse(strategy))


def test_a_pass_is_lost_with_any_change_of_what_is_computed(write: Callable[..., str], tmp_path: Path) -> None:
    ops = tmp_path / "reach_ops.py"
    through = {
        "helpers": f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport reach_ops",
        "inside": "h = reach_ops.f(h)",
    }

    def with_ops(text: str) -> str:
        import sys

        ops.write_text(text)
        sys.modules.pop("reach_ops", None)
        return key_of(write(**through))

    keys = [key_of(write()), key_of(write(), "dp(3)"), key_of(write(), loss_over="batch")]
    keys.append(key_of(write(scale="2.0")))  # Held in an object.
    keys.append(key_of(write(constant="0.5")))  # In a buffer.
    keys.append(key_of(write(inside="h = h * torch.tensor([0.5])")))
    keys.append(key_of(write(inside="h = h * torch.tensor([0.25])")))
    keys.append(key_of(write(helpers="RATE = 0.5", inside="h = h * RATE")))
    keys.append(key_of(write(helpers="RATE = 0.75", inside="h = h * RATE")))
    keys.append(key_of(write(optimizer="torch.optim.AdamW(groups, lr=0.02)")))
    keys.append(key_of(write(optimizer="torch.optim.Adam(groups, lr=0.01)")))
    keys.append(key_of(write(more="buffers='average',")))
    # A gradient of one's own shows in no traced forward: functions put into a class later, callables that it holds.
    for later in ("2 * g", "3 * g"):
        keys.append(key_of(write(helpers=OWN_GRADIENT.format(later=later), inside="h = Own.apply(h)")))
    for factor in ("2.0", "3.0"):
        helpers = OWN_GRADIENT.format(later="Own.times(g)") + f"Own.times = Times({factor})\n"
        keys.append(key_of(write(helpers=helpers, inside="h = Own.apply(h)")))
    for factor in ("2.0", "3.0"):
        keys.append(key_of(write(init=f"self.up.weight.register_hook(lambda g: {factor} * g)")))
    keys.append(key_of(write(data="data = data.abs()")))
    keys += [with_ops("def f(h):\n    return h * 2\n"), with_ops("def f(h):\n    return h * 3\n")]
    assert len(set(keys)) == len(keys)
    assert key_of(write()) == keys[0]
    assert key_of(write(), seed=0, steps=7) == keys[0]


def test_the_backend_is_part_of_the_key(write: Callable[..., str]) -> None:
    job = load_file(write())
    model = build_without_memory(job)
    assert fingerprint(job, model, parse("dp(2)")) != fingerprint(job, model, parse("dp(2)"), backend="gloo")


# The file of passes


def test_entries_that_this_user_did_not_make_count_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remember("a", job="mine")
    assert is_proven("a")
    content = json.loads(proven_file().read_text())
    entry = content["proven"]["a"]
    for forged in (
        {"b": entry},
        {"b": {"job": "x"}},
        {"b": {**entry, "code": "é"}},
        {"a": {**entry, "job": "x"}},
        {"b": 3},
    ):
        proven_file().write_text(json.dumps({"proven": forged}))
        assert not is_proven("a")
        assert not is_proven("b")
    proven_file().write_text(json.dumps(content))
    assert is_proven("a")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    proven_file().parent.mkdir(parents=True)
    proven_file().write_text(json.dumps(content))
    assert not is_proven("a"), "copied from another user"
    remember("c", job="mine")
    assert list(json.loads(proven_file().read_text())["proven"]) == ["c"]


def test_a_secret_that_others_may_read_is_no_secret() -> None:
    remember("a", job="mine")
    assert secret_file().stat().st_mode & 0o077 == 0
    secret_file().chmod(0o644)
    assert not is_proven("a")


@pytest.mark.parametrize("make", ["fifo", "link", "folder"])
def test_what_is_no_regular_file_costs_a_check_and_nothing_else(make: str, tmp_path: Path) -> None:
    import os

    remember("a", job="mine")
    content = proven_file().read_text()
    proven_file().unlink()
    if make == "fifo":
        os.mkfifo(proven_file())
    elif make == "link":
        (tmp_path / "other").write_text(content)
        proven_file().symlink_to(tmp_path / "other")
    else:
        proven_file().mkdir()
    assert not is_proven("a")
    remember("b", job="mine")
    assert is_proven("b") == (make != "folder")


def test_every_room_whose_text_counts_is_there() -> None:
    home = Path(shoal.__file__).parent
    assert [room for room in OWN_ROOMS if not (home / room).exists()] == []
