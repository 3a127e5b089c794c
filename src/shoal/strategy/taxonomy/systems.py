"""The field's known systems, each written as a strategy. Sizes are typical of their papers; what matters is which terms they use.

Where a system offers many ways to train, the row shows the one it is known for. Nothing here says where a system stands in a
taxonomy: that is computed from the strategy.
"""
# ruff: noqa: E501  (a table reads by rows)

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from shoal.strategy.expression import Strategy
from shoal.strategy.terms import bsp, dp
from shoal.strategy.terms.term import Term
from shoal.strategy.text import parse


class System(NamedTuple):
    """One system of the field."""

    name: str
    year: int
    source: str
    """Authors and venue, in words."""
    text: str
    """How it trains, as a strategy."""
    note: str

    @property
    def strategy(self) -> Strategy:
        return _parsed(self.text)


@cache
def _parsed(text: str) -> Strategy:
    return parse(text)


SYSTEMS: tuple[System, ...] = tuple(
    System(*row)
    for row in (
        # The years of parameter servers.
        (
            "HOGWILD!",
            2011,
            "Niu, Recht, Re and Wright, NIPS",
            "dp(8, sync=hogwild())",
            "lock-free updates of one copy in shared memory",
        ),
        (
            "DistBelief (Downpour SGD)",
            2012,
            "Dean et al., NIPS",
            "dp(8, sync=asp(), via=ps(4)) * tp(4)",
            "model replicas over several machines, sharded servers, no waiting",
        ),
        (
            "Petuum",
            2013,
            "Ho et al., NIPS; Xing et al., KDD 2015",
            "dp(8, sync=ssp(3), via=ps(8, colocated=True))",
            "stale-synchronous tables, served by the workers' own machines",
        ),
        (
            "Project Adam",
            2014,
            "Chilimbi et al., OSDI",
            "dp(4, sync=asp(), via=ps(4)) * tp(4) * dp(4, sync=hogwild())",
            "models in slices through all layers, lock-free threads in each machine, asynchronous servers",
        ),
        (
            "Parameter Server",
            2014,
            "Li et al., OSDI",
            "dp(8, sync=ssp(4), via=ps(4))",
            "sharded servers with a bounded delay of the user's choice",
        ),
        (
            "1-bit SGD (CNTK)",
            2014,
            "Seide et al., Interspeech",
            "dp(8, compress=onebit())",
            "one bit per element, with error feedback",
        ),
        (
            "CNTK (BMUF)",
            2016,
            "Chen and Huo, ICASSP",
            "dp(16, sync=bmuf(32))",
            "blocks of local steps, averaged and filtered with block momentum",
        ),
        (
            "EASGD",
            2015,
            "Zhang, Choromanska and LeCun, NIPS",
            'dp(8, sync=elastic(10, 0.1125, "async"), via=ps(1))',
            "replicas explore around a centre that one server holds",
        ),
        (
            "SINGA",
            2015,
            "Ooi et al., ACM Multimedia",
            "dp(4, sync=asp(), via=ps(2)) * dp(4) * tp(2)",
            "groups of workers: synchronous inside, asynchronous between",
        ),
        (
            "MXNet",
            2015,
            "Chen et al., NIPS workshop",
            "dp(8, via=ps(8, colocated=True))",
            "a two-level key-value store on the workers' machines",
        ),
        (
            "SparkNet",
            2015,
            "Moritz et al., ICLR 2016",
            "dp(8, sync=local(50), via=ps(1))",
            "the driver averages models after many local steps",
        ),
        (
            "Rudra",
            2016,
            "Gupta, Zhang and Wang, ICDM",
            "dp(16, sync=softsync(4), via=ps(1))",
            "n-softsync: the server steps when a fraction of the gradients has come",
        ),
        (
            "TensorFlow (backup workers)",
            2016,
            "Abadi et al., OSDI; Chen et al., ICLR workshop",
            "dp(12, sync=bsp(backup=2), via=ps(4))",
            "sharded servers take the first gradients and drop the rest",
        ),
        (
            "FireCaffe",
            2016,
            "Iandola et al., CVPR",
            'dp(32, via=allreduce("tree"))',
            "reduction trees instead of a server",
        ),
        (
            "PaddlePaddle",
            2016,
            "Baidu, open source",
            "dp(8, sync=asp(), via=ps(8))",
            "asynchronous training on sharded servers",
        ),
        (
            "Gaia",
            2017,
            "Hsieh et al., NSDI",
            "dp(3, sync=ssp(2), via=ps(3, colocated=True), compress=threshold(0.01)) * dp(8, via=ps(8, colocated=True))",
            "servers in each data centre; only significant updates cross between centres",
        ),
        (
            "BigDL",
            2019,
            "Dai et al., SoCC",
            "dp(16, via=ps(16, colocated=True))",
            "every Spark task serves one slice of the parameters",
        ),
        (
            "BytePS",
            2020,
            "Jiang et al., OSDI",
            "dp(4, via=ps(4)) * dp(8)",
            "spare CPU machines serve; GPUs of a machine reduce first",
        ),
        # Collectives.
        ("PyTorch DDP", 2020, "Li et al., VLDB", "dp(8)", "bucketed all-reduce that overlaps with the backward pass"),
        (
            "Horovod",
            2018,
            "Sergeev and Del Balso",
            'dp(8, via=allreduce("ring"))',
            "ring all-reduce with fused tensors",
        ),
        (
            "LBANN",
            2015,
            "Van Essen et al., MLHPC; Dryden et al., IPDPS 2019",
            "dp(4) * spatial(4)",
            "data and spatial parallelism of convolutions",
        ),
        (
            "One weird trick",
            2014,
            "Krizhevsky",
            "tp(8, batch=True)",
            "convolutions split by data, fully connected layers by model",
        ),
        # Compression.
        ("QSGD", 2017, "Alistarh et al., NIPS", "dp(8, compress=qsgd(4))", "random rounding, right on average"),
        (
            "TernGrad",
            2017,
            "Wen et al., NIPS",
            "dp(8, via=ps(1), compress=ternary())",
            "three values per element, through a server",
        ),
        (
            "Deep Gradient Compression",
            2018,
            "Lin et al., ICLR",
            "dp(8, compress=dgc(0.001))",
            "0.1% of the elements, with corrected momentum",
        ),
        (
            "signSGD with majority vote",
            2018,
            "Bernstein et al., ICML",
            "dp(8, via=ps(1), compress=sign())",
            "one sign per element",
        ),
        (
            "PowerSGD",
            2019,
            "Vogels, Karimireddy and Jaggi, NeurIPS",
            "dp(8, compress=powersgd(2))",
            "low rank by power iteration",
        ),
        (
            "gTop-k S-SGD",
            2019,
            "Shi et al., ICDCS",
            "dp(8, compress=gtopk(0.001))",
            "a tree keeps the k largest of the sum",
        ),
        (
            "Sketched SGD",
            2019,
            "Ivkin et al., NeurIPS",
            "dp(8, via=ps(1), compress=sketch(5, 100000))",
            "a server adds sketches",
        ),
        (
            "gs-SGD",
            2021,
            "preprint on sketched gradients in tree all-reduce",
            'dp(8, via=allreduce("tree"), compress=sketch(5, 100000))',
            "sketches are summed up a tree",
        ),
        (
            "MSTopK and HiTopKComm",
            2020,
            "Shi et al., MLSys 2021",
            "dp(16, compress=hitopk(0.01)) * dp(8)",
            "dense inside a machine, sparse between machines",
        ),
        (
            "1-bit Adam",
            2021,
            "Tang et al., ICML",
            "dp(8, compress=onebit()) * accumulate(4)",
            "compressed momentum after a warm-up",
        ),
        # Averaging and gossip.
        ("Local SGD", 2019, "Stich, ICLR", "dp(8, sync=local(8))", "periodic averaging"),
        ("D-PSGD", 2017, "Lian et al., NIPS", 'dp(8, sync=gossip("ring"))', "averaging with two neighbours"),
        (
            "AD-PSGD",
            2018,
            "Lian et al., ICML",
            'dp(8, sync=gossip("ring", "async"))',
            "averaging with one neighbour at a time, no replica waits",
        ),
        (
            "SGP (push-sum)",
            2019,
            "Assran et al., ICML",
            'dp(8, sync=gossip("exponential", "push-sum"))',
            "push-sum on a directed graph",
        ),
        (
            "DiLoCo",
            2023,
            "Douillard et al.",
            'dp(8, sync=diloco(500)) * dp(8, zero=2) * amp("bf16")',
            "islands of accelerators, an outer step every few hundred",
        ),
        # Low communication, since 2023. What a system adds beyond its terms stands in its note.
        (
            "SlowMo",
            2020,
            "Wang et al., ICLR",
            "dp(8, sync=bmuf(12, momentum=0.5))",
            "a slow momentum over periodic averages",
        ),
        (
            "hivemind",
            2021,
            "Ryabinin et al., NeurIPS (Moshpit SGD); Learning@home",
            'dp(16, sync=gossip("random"), compress=fp16())',
            "volunteers average in small groups that change; any of them may come and go",
        ),
        (
            "Asynchronous Local-SGD",
            2024,
            "Liu et al., arXiv 2401.09135",
            "dp(8, sync=asp(), via=ps(1)) * dp(4)",
            "a server applies each worker's many local steps when they come, its momentum delayed",
        ),
        (
            "OpenDiLoCo",
            2024,
            "Jaghouar, Ong and Hagemann, arXiv 2407.07852",
            'dp(8, sync=diloco(500), compress=fp16()) * dp(8, zero=3) * amp("bf16")',
            "DiLoCo over hivemind, across continents",
        ),
        (
            "prime (INTELLECT-1)",
            2024,
            "Jaghouar et al., arXiv 2412.01152",
            'dp(14, sync=diloco(100), compress=int8()) * dp(8, zero=3) * amp("bf16")',
            "pseudo-gradients in 8 bits; nodes join and leave between two exchanges",
        ),
        (
            "DeMo",
            2024,
            "Peng, Quesnelle and Kingma, arXiv 2411.19870",
            "dp(8, compress=demo(0.008, signs=True))",
            "the fast cosine components of local momenta are sent, in every step",
        ),
        (
            "Psyche (DisTrO)",
            2025,
            "Nous Research, open source",
            'dp(16, compress=demo(0.008, signs=True)) * dp(8, zero=1) * amp("bf16")',
            "DeMo over the internet, coordinated by a blockchain",
        ),
        (
            "EDiT",
            2024,
            "Cheng et al., arXiv 2412.07210",
            'dp(8, sync=diloco(128)) * dp(8, zero=3) * amp("bf16")',
            "layer by layer while the next forward runs; anomalous workers are dropped from the mean",
        ),
        (
            "torchft",
            2024,
            "Meta, open source",
            'dp(4) * dp(8, zero=3) * amp("bf16")',
            "replica groups that may fail and rejoin in any step, shards inside",
        ),
        (
            "torchft DiLoCo",
            2025,
            "Meta, open source",
            'dp(4, sync=diloco(20, fragments=2)) * dp(8, zero=3) * amp("bf16")',
            "the same with local steps, and fragments as Streaming DiLoCo",
        ),
        (
            "Streaming DiLoCo",
            2025,
            "Douillard et al., arXiv 2501.18512",
            'dp(4, sync=diloco(100, fragments=4, overlap=5, blend=0.5)) * dp(8, zero=3) * amp("bf16")',
            "fragments of layers in turn, applied some steps late; on the wire in 4 bits (e3m0)",
        ),
        (
            "Eager DiLoCo",
            2025,
            "Kale, Douillard and Donchev, arXiv 2502.12996",
            "dp(4, sync=diloco(30, eager=True)) * dp(8, zero=3)",
            "the exchange overlaps with the next period; the own part is applied at once",
        ),
        (
            "MuLoCo",
            2025,
            "Therien et al., arXiv 2505.23725",
            "dp(8, sync=diloco(30)) * dp(4, zero=1)",
            "Muon inside, DiLoCo outside",
        ),
        (
            "DES-LOC",
            2025,
            "Iacob et al., arXiv 2505.22549",
            'dp(8, sync=local(64, state="averaged", m=192, v=384)) * dp(8, zero=3)',
            "parameters and both moments are averaged, each with a period of its own",
        ),
        (
            "HALoS",
            2025,
            "Kim et al., arXiv 2506.04531",
            "dp(4, sync=asp(), via=ps(1)) * dp(4, sync=asp(), via=ps(1))",
            "a server in each region, a global one above",
        ),
        (
            "NoLoCo",
            2025,
            "Kolehmainen et al., arXiv 2506.10911",
            'dp(16, sync=gossip("random", h=50, momentum=0.5)) * pp(2, micro=8)',
            "random pairs with an outer momentum, no global collective",
        ),
        (
            "SparseLoCo",
            2025,
            "Sarfi et al., arXiv 2508.15706",
            "dp(8, sync=diloco(30, lr=1.0, momentum=0.0), compress=chunktopk(0.03))",
            "2-bit chunk-wise top-k of pseudo-gradients with a decaying memory instead of an outer momentum",
        ),
        (
            "Templar",
            2025,
            "Covenant AI, open source",
            'dp(16, sync=diloco(30, lr=1.0, momentum=0.0), compress=chunktopk(0.016)) * dp(8, zero=3) * amp("bf16")',
            "SparseLoCo among peers who need no permission; contributions are scored",
        ),
        (
            "MaxText DiLoCo",
            2025,
            "Google, open source",
            'dp(2, sync=diloco(36)) * dp(16, zero=3) * amp("bf16")',
            "a DiLoCo axis of a JAX mesh",
        ),
        (
            "EXO Gym",
            2025,
            "EXO Labs, open source",
            "dp(4, sync=diloco(100))",
            "low-communication methods simulated on one machine",
        ),
        (
            "Decoupled DiLoCo",
            2026,
            "arXiv 2604.21428",
            'dp(8, sync=diloco(50, quorum=6, merge="radial", weight="tokens2/steps", fragments=2, overlap=5))',
            "a quorum of learners merges within a grace window; a dead one delays no other",
        ),
        (
            "GASLoC",
            2026,
            "arXiv 2606.11081",
            'dp(16, sync=gossip("exponential", h=30, momentum=0.5))',
            "gossip with local steps and an outer momentum",
        ),
        (
            "AlexNet ensemble",
            2012,
            "Krizhevsky, Sutskever and Hinton, NIPS",
            "ensemble(5) * tp(2)",
            "five networks, each over two devices, trained separately; predictions averaged",
        ),
        (
            "Distillation",
            2015,
            "Hinton, Vinyals and Dean",
            "ensemble(10, distill=True)",
            "one network learns from an ensemble",
        ),
        # Pipelines.
        (
            "GPipe",
            2019,
            "Huang et al., NeurIPS",
            'pp(8, "gpipe", micro=32) * recompute("full")',
            "micro-batches, a flush, recomputation",
        ),
        ("TorchGPipe", 2020, "Kim et al.", 'pp(4, "gpipe", micro=16) * recompute("full")', "GPipe for PyTorch"),
        ("PipeDream", 2019, "Narayanan et al., SOSP", 'pp(4, "pipedream") * dp(2)', "no flush; stashed weights"),
        (
            "PipeDream-Flush",
            2021,
            "Narayanan et al., ICML",
            'pp(4, "1f1b", micro=16) * dp(2)',
            "the 1F1B schedule with a flush",
        ),
        (
            "AxoNN",
            2022,
            "Singh and Bhatele, IPDPS",
            'pp(4, "1f1b", micro=16) * dp(4) * offload("optimizer")',
            "message-driven pipelines with data parallelism; optimiser state in host memory",
        ),
        (
            "Zero-bubble pipeline",
            2024,
            "Qi et al., ICLR",
            'pp(8, "zero-bubble", micro=32)',
            "backward split into two halves",
        ),
        # Sharding, tensors, experts, sequences.
        ("Mesh-TensorFlow", 2018, "Shazeer et al., NeurIPS", "dp(8) * tp(8)", "named dimensions laid out on a mesh"),
        (
            "FlexFlow",
            2019,
            "Jia, Zaharia and Aiken, MLSys",
            "dp(4) * tp(4) * spatial(2)",
            "a search over splits of samples, operators, attributes",
        ),
        ("Megatron-LM", 2019, "Shoeybi et al.", "dp(8) * tp(8)", "columns and rows of each block"),
        (
            "Megatron-LM distributed optimizer",
            2022,
            "NVIDIA, open source",
            "dp(8, zero=1) * tp(8)",
            "optimiser state in shards over the replicas of each tensor slice",
        ),
        (
            "Megatron-LM 3D",
            2021,
            "Narayanan et al., SC",
            'pp(8, "interleaved", micro=64, chunks=2) * dp(8) * tp(8) * recompute("full") * amp("fp16")',
            "pipeline, tensor and data together",
        ),
        (
            "Megatron sequence parallelism",
            2022,
            "Korthikanti et al., MLSys 2023",
            'pp(8, "interleaved", micro=64, chunks=2) * dp(8) * tp(8, sequence=True) * recompute("selective") * amp("bf16")',
            "activations between cut layers are cut too; selective recomputation",
        ),
        (
            "ZeRO (DeepSpeed)",
            2020,
            "Rajbhandari et al., SC",
            'dp(64, zero=2) * amp("fp16")',
            "optimiser state and gradients in shards",
        ),
        (
            "ZeRO-Offload",
            2021,
            "Ren et al., USENIX ATC",
            'dp(8, zero=2) * amp("fp16") * offload("optimizer") * offload("gradients")',
            "optimiser state and gradients in host memory",
        ),
        (
            "ZeRO-Infinity",
            2021,
            "Rajbhandari et al., SC",
            'dp(64, zero=3) * recompute("full") * amp("fp16") * offload("optimizer") * offload("parameters") * offload("activations")',
            "everything in shards, beyond the device's memory",
        ),
        (
            "DeepSpeed 3D",
            2020,
            "Microsoft, open source",
            'pp(4, "1f1b", micro=16) * dp(4, zero=1) * tp(4) * amp("fp16")',
            "pipeline, ZeRO-1 and tensor",
        ),
        ("FSDP", 2023, "Zhao et al., VLDB", 'dp(64, zero=3) * amp("bf16")', "parameters gathered layer by layer"),
        (
            "FSDP hybrid sharding",
            2023,
            "Zhao et al., VLDB",
            'dp(8) * dp(8, zero=3) * amp("bf16")',
            "shards inside a machine, replicas outside",
        ),
        (
            "KARMA",
            2020,
            "Wahib et al., SC",
            'dp(64) * recompute("selective") * offload("activations") * offload("parameters")',
            "data parallelism out of core: swap and recompute",
        ),
        (
            "Alpa",
            2022,
            "Zheng et al., OSDI",
            'pp(4, "1f1b", micro=32) * dp(2) * tp(4)',
            "stages between groups, operators split within",
        ),
        (
            "Colossal-AI",
            2023,
            "Li et al., ICPP",
            'pp(2, "1f1b", micro=8) * dp(2, zero=1) * tp(4) * amp("fp16")',
            "a toolbox of all of them",
        ),
        (
            "torchtitan",
            2024,
            "Liang et al., ICLR 2025",
            'pp(2, "interleaved", micro=8, chunks=2) * dp(8, zero=3) * cp(2) * tp(4, sequence=True) * amp("bf16")',
            "four dimensions on one mesh",
        ),
        ("GShard", 2021, "Lepikhin et al., ICLR", "ep(128)", "experts over all devices, replicas for the rest"),
        (
            "Switch Transformer",
            2022,
            "Fedus, Zoph and Shazeer, JMLR",
            'dp(4) * ep(32) * tp(2) * amp("bf16")',
            "one expert per token",
        ),
        (
            "DeepSpeed-MoE",
            2022,
            "Rajbhandari et al., ICML",
            'dp(2, zero=1) * ep(8) * tp(2) * amp("fp16")',
            "experts with ZeRO and tensor parallelism",
        ),
        (
            "DeepSeek-V3",
            2024,
            "DeepSeek-AI",
            'pp(16, "zero-bubble", micro=32, chunks=2) * dp(2, zero=1) * ep(64) * amp("bf16")',
            "a bidirectional pipeline without bubbles, experts, ZeRO-1",
        ),
        (
            "Ring Attention",
            2023,
            "Liu, Zaharia and Abbeel, ICLR 2024",
            'dp(4, zero=3) * cp(8) * recompute("full") * amp("bf16")',
            "keys and values go round",
        ),
        (
            "DeepSpeed-Ulysses",
            2023,
            "Jacobs et al.",
            'dp(8, zero=3) * cp(8, "ulysses") * amp("bf16")',
            "sequence to heads and back by all-to-all",
        ),
        (
            "Llama 3",
            2024,
            "Llama team, Meta",
            'dp(64, zero=2) * pp(16, "interleaved", micro=16, chunks=8) * cp(16) * tp(8, sequence=True) * amp("bf16")',
            "four dimensions, tensor innermost",
        ),
        (
            "Spatial parallelism (CosmoFlow)",
            2021,
            "Oyama et al., TPDS",
            'dp(64) * spatial(8, "both")',
            "samples larger than a device",
        ),
    )
)
"""Every known system, by era and kind."""


class Likeness(NamedTuple):
    """A known system compared with a strategy."""

    system: System
    same: bool
    """Whether it trains with the same kinds of axes, whatever their sizes and modifiers."""
    shared: float
    """The part of all kinds of terms, of both, that both have."""


def systems_like(strategy: Strategy, *, limit: int = 5) -> tuple[Likeness, ...]:
    """The known systems that train this way; if there is none, those that come nearest."""
    axes, modifiers = _axis_kinds(strategy), _modifier_kinds(strategy)
    found = []
    for system in SYSTEMS:
        other_axes, other_modifiers = _axis_kinds(system.strategy), _modifier_kinds(system.strategy)
        ours, theirs = axes | modifiers, other_axes | other_modifiers
        shared = len(ours & theirs) / (len(ours | theirs) or 1)
        if axes & other_axes:
            found.append(Likeness(system, axes == other_axes, shared))
    found.sort(key=lambda likeness: (not likeness.same, -likeness.shared, likeness.system.year))
    if any(likeness.same for likeness in found):
        found = [likeness for likeness in found if likeness.same]
    return tuple(found[:limit])


Kinds = frozenset[tuple[str, str]]
"""Names of terms with their choices, without sizes and other numbers."""


def _axis_kinds(strategy: Strategy) -> Kinds:
    kinds: set[tuple[str, str]] = set()
    for axis in strategy.axes:
        kinds.add((axis.name, ""))
        if isinstance(axis.term, dp):
            level = axis.term
            kinds.add((axis.name, f"zero={level.zero}"))
            kinds |= {(axis.name, type(part).__name__) for part in (level.sync, level.via, level.compress)}
            if isinstance(level.sync, bsp) and level.sync.backup:
                kinds.add((axis.name, "backup"))
        else:
            kinds |= {(axis.name, choice) for choice in _choices(axis.term)}
    return frozenset(kinds)


def _modifier_kinds(strategy: Strategy) -> Kinds:
    return frozenset((type(term).__name__, choice) for term in strategy.modifiers for choice in ("", *_choices(term)))


def _choices(term: Term) -> list[str]:
    return [f"{name}={value}" for name, value in term.values().items() if isinstance(value, (str, bool))]
