"""From a term to the method that runs it."""

from __future__ import annotations

from shoal.comm.compress.codec import Codec
from shoal.comm.compress.compressed import Compressed
from shoal.comm.compress.dense import Dense
from shoal.comm.compress.dgc import Dgc
from shoal.comm.compress.feedback import Nothing, Residual
from shoal.comm.compress.gtopk import GTopK
from shoal.comm.compress.half import Fp16
from shoal.comm.compress.int8 import Int8
from shoal.comm.compress.method import Method
from shoal.comm.compress.mstopk import MsTopK
from shoal.comm.compress.onebit import OneBit
from shoal.comm.compress.powersgd import PowerSgd
from shoal.comm.compress.qsgd import Qsgd
from shoal.comm.compress.randomk import RandomK
from shoal.comm.compress.sign import Sign
from shoal.comm.compress.sketch import Sketch
from shoal.comm.compress.ternary import Ternary
from shoal.comm.compress.threshold import Threshold
from shoal.comm.compress.topk import TopK
from shoal.strategy.terms import compress as terms


def method_of(term: terms.CompressTerm, *, clip: float | None = None) -> Method:
    """The method for a term. `clip`: the job's bound on the norm of the gradient, which DGC applies on each rank."""
    match term:
        case terms.none():
            return Dense(term)
        case terms.fp16():
            return Fp16(term)
        case terms.dgc():
            return Dgc(term, clip=clip)
        case terms.gtopk():
            return GTopK(term)
        case terms.sketch():
            return Sketch(term)
        case terms.powersgd():
            return PowerSgd(term)
        case terms.threshold():
            return Compressed(term, codec=Threshold(least=term.t), feedback=Residual(), equal_sizes=False)
    feedback = Nothing() if term.loss == "unbiased" else Residual()
    return Compressed(term, codec=codec_of(term), feedback=feedback)


def codec_of(term: terms.CompressTerm) -> Codec:
    """The codec of a term whose payloads are all of one size."""
    match term:
        case terms.int8():
            return Int8()
        case terms.qsgd():
            return Qsgd(bits=term.bits)
        case terms.ternary():
            return Ternary()
        case terms.onebit():
            return OneBit()
        case terms.sign():
            return Sign()
        case terms.topk():
            return TopK(fraction=term.r)
        case terms.mstopk() | terms.hitopk():
            return MsTopK(fraction=term.r)
        case terms.randomk():
            return RandomK(fraction=term.r)
    raise ValueError(f"there is no compression for {term!r}; expected a term of shoal.strategy.terms.compress")
