"""Every compressor that is registered, with arguments that suit the small tensors of tests."""

from __future__ import annotations

from shoal.strategy import parse
from shoal.strategy.terms.compress import CompressTerm, compressors

SMALL = {"hitopk": "hitopk(0.02)", "powersgd": "powersgd(2)", "sketch": "sketch(3, 64)", "threshold": "threshold(0.5)"}
"""Where the sample of a method is made for larger ones."""


def term_of(text: str) -> CompressTerm:
    return parse(f"dp(2, compress={text}) * dp(2)").dp_levels[0].compress


def written(loss: str, **instead: str) -> list[str]:
    """The text of every method with such a loss, as its sample says, or as is given by name."""
    named = [(method.__name__, str(method.sample())) for method in compressors() if method.loss == loss]
    return [instead.get(name, text) for name, text in named]


ALL = [term_of(SMALL.get(method.__name__, str(method.sample()))) for method in compressors()]
LOSSY = [term for term in ALL if term.loss != "none"]
FEEDBACK = [term for term in ALL if term.loss == "feedback"]
UNBIASED = [term for term in ALL if term.loss == "unbiased"]
GATHERED = [term for term in ALL if term.payload_bytes(1000, 4) is not None]
"""Those whose payloads are of one size and go to all ranks."""
