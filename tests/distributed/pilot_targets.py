"""What ranks do in test_pilot.py."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from benchmarks.peers.pilot import measure_computing, measure_ends, slower, with_background

from shoal.calibration.codecs import measure_codecs
from shoal.comm.emulate import parse_emulation
from shoal.comm.group import BACKENDS
from shoal.comm.network import DEFAULT
from shoal.estimate.crossover import FRAMED, Codec, Computing, Ends, ReducedBucket, Setting
from shoal.job import load_job
from shoal.launch.join import join, leave
from shoal.runtime.setup import prepare
from shoal.strategy import parse
from shoal.strategy.terms.compress import int8

SLOW = "2x1, 10us, 20GB/s | 50us, 20Mb/s"


def pilots(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """A setting from a few steps over an unlimited link."""
    me = join(backend=BACKENDS["shoal"])
    group: Any = dist.new_group(backend=BACKENDS["shoal"])
    ends = with_background(measure_ends(group, framed=FRAMED, rounds=2), group, lambda bytes_per_s: None, rounds=2)
    job = load_job("language:tiny")
    prepared = prepare(job, parse("dp(2)"), rank=me.rank, backend=me.backend)
    runner = prepared.runner
    computing = measure_computing(
        lambda number: runner.step(number, number * job.global_batch), prepared.engine, ends, group, steps=3
    )
    parameters = sum(parameter.numel() for parameter in prepared.engine.model.parameters())
    left = dict(prepared.engine.reduction.on_done)
    prepared.engine.close()
    leave()
    return {"computing": asdict(computing), "ends": asdict(ends), "parameters": parameters, "left": len(left)}


def steps_on_a_slow_link(arguments: dict[str, Any], channel: Any) -> dict[str, Any]:
    """Fastest dense and compressed steps where the wire takes nearly all of the time, measured and predicted."""
    me = join(backend=BACKENDS["shoal"], emulate=SLOW)
    group: Any = dist.new_group(backend=BACKENDS["shoal"])
    job = load_job("language:tiny")
    found: dict[str, Any] = {}
    for name in ("dp(2)", "dp(2, compress=int8())"):
        prepared = prepare(job, parse(name), rank=me.rank, backend=me.backend)
        times = []
        for number in range(4):
            dist.barrier(group=group)
            start_s = time.perf_counter()
            prepared.runner.step(number, number * job.global_batch)
            times.append(time.perf_counter() - start_s)
        found[name] = slower(min(times), group)
        if name == "dp(2)":
            shapes = [[tuple(slot.shape) for slot in bucket.buffer.slots] for bucket in prepared.engine.buckets]
        prepared.engine.close()
    tensor_s, element_s = measure_codecs(terms=(int8(),), rounds=1)["int8()"]
    computing = Computing(step_s=0.0, buckets=tuple(ReducedBucket(shapes=tuple(each), ready_s=0.0) for each in shapes))
    setting = Setting(computing=computing, ends=Ends(times=DEFAULT.inside), latency_s=50e-6)
    bytes_per_s = parse_emulation(SLOW).between.bytes_per_s
    found["dense_wire"] = setting.dense_s(bytes_per_s)
    found["int8_wire"] = setting.compressed_s(int8(), Codec(tensor_s=tensor_s, element_s=element_s), bytes_per_s)
    leave()
    return found
