"""Transformers as operators, from their shapes alone.

A shape does not say everything, so the rest follows its family: gated ones are Llama's (root-mean-square norms, rotary
positions, no biases), other causal ones GPT's, tied ones without a mask BERT's, and those left are vision transformers.
"""

from __future__ import annotations

from typing import Literal

from shoal.analysis.convolution import Convolution
from shoal.analysis.elementwise import Activation, Add, Concatenation, Multiply, Rotary
from shoal.analysis.lookup import Embedding
from shoal.analysis.network import Network, NetworkBuilder
from shoal.analysis.operator import Operator
from shoal.analysis.products import AttentionProduct, FullyConnected
from shoal.analysis.reductions import LayerNorm, Loss, Softmax
from shoal.shapes.shape import Transformer

PATCHES = {197: (224, 16), 257: (224, 14)}
"""Positions of a vision transformer -> side of its image and of a patch; one position more is the class's."""

Family = Literal["llama", "gpt", "bert", "vit"]


def family_of(shape: Transformer) -> Family:
    if shape.gated:
        return "llama"
    if shape.causal:
        return "gpt"
    return "bert" if shape.tied else "vit"


def network_of(shape: Transformer, batch: int, *, attention_bias: bool | None = None) -> Network:
    """One training step of a transformer on `batch` sequences of its length. Biases on query, key and value follow
    the family unless they are named.
    """
    return _Writer(shape, batch, attention_bias).network()


class _Writer:
    """Writes the layers down, block by block."""

    def __init__(self, shape: Transformer, batch: int, attention_bias: bool | None) -> None:
        self.shape, self.batch, self.family = shape, batch, family_of(shape)
        self.rows = batch * shape.sequence
        self.bias = self.family != "llama"
        self.attention_bias = self.bias if attention_bias is None else attention_bias
        self.head_dim = shape.hidden // shape.heads
        self.builder = NetworkBuilder(name=shape.name, batch=batch)

    def network(self) -> Network:
        x = self._patches() if self.family == "vit" else self._tokens()
        for number in range(self.shape.layers):
            self.builder.block = f"blocks.{number}"
            x = self._block(x)
        self._head(x)
        return self.builder.network()

    def _add(self, name: str, operator: Operator, *inputs: int | None, experts: int = 0) -> int:
        return self.builder.add(name, operator, *inputs, experts=experts)

    def _project(self, name: str, x: int, inputs: int, outputs: int, *, bias: bool | None = None) -> int:
        bias = self.bias if bias is None else bias
        return self._add(name, FullyConnected(rows=self.rows, inputs=inputs, outputs=outputs, bias=bias), x)

    def _norm(self, name: str, x: int) -> int:
        return self._add(name, LayerNorm(rows=self.rows, width=self.shape.hidden, bias=self.bias), x)

    def _tokens(self) -> int:
        shape = self.shape
        x = self._add("tokens", Embedding(lookups=self.rows, table=shape.vocab, width=shape.hidden))
        if self.family == "llama":
            return x
        at = self._add("positions", Embedding(lookups=shape.sequence, table=shape.sequence, width=shape.hidden))
        self.builder.block = "positions"
        x = self._add("positions.add", Add(elements=self.rows * shape.hidden), x, at)
        if self.family == "bert":
            self.builder.block = "segments"
            kind = self._add("segments", Embedding(lookups=self.rows, table=2, width=shape.hidden))
            x = self._add("segments.add", Add(elements=self.rows * shape.hidden), x, kind)
            x = self._norm("segments.norm", x)
        self.builder.block = ""
        return x

    def _patches(self) -> int:
        shape = self.shape
        if shape.sequence not in PATCHES:
            raise ValueError(
                f"{shape.name!r}: a vision transformer of {shape.sequence} positions is not known; expected one of "
                f"{', '.join(str(length) for length in PATCHES)}"
            )
        side, patch = PATCHES[shape.sequence]
        self.builder.block = "patches"
        x = self._add(
            "patches",
            Convolution(
                samples=self.batch,
                in_channels=3,
                out_channels=shape.hidden,
                image=(side, side),
                kernel=(patch, patch),
                stride=(patch, patch),
                padding=(0, 0),
                dilation=(1, 1),
            ),
        )
        token = self._add("patches.class", Embedding(lookups=1, table=1, width=shape.hidden))
        x = self._add("patches.join", Concatenation(elements=self.rows * shape.hidden), x, token)
        at = self._add("positions", Embedding(lookups=shape.sequence, table=shape.sequence, width=shape.hidden))
        return self._add("positions.add", Add(elements=self.rows * shape.hidden), x, at)

    def _block(self, x: int) -> int:
        """Norms come before the parts, in BERT behind the additions."""
        at, behind = self.builder.block, self.family == "bert"
        elements = self.rows * self.shape.hidden
        inner = self._attention(x if behind else self._norm(f"{at}.attention_norm", x))
        x = self._add(f"{at}.attention.add", Add(elements=elements), x, inner)
        x = self._norm(f"{at}.attention_norm", x) if behind else x
        part = self._mixture if self.shape.experts else self._feed_forward
        inner = part(x if behind else self._norm(f"{at}.mlp_norm", x))
        x = self._add(f"{at}.mlp.add", Add(elements=elements), x, inner)
        return self._norm(f"{at}.mlp_norm", x) if behind else x

    def _attention(self, x: int) -> int:
        at, shape = f"{self.builder.block}.attention", self.shape
        kv_width = shape.kv_heads * self.head_dim
        query = self._project(f"{at}.query", x, shape.hidden, shape.hidden, bias=self.attention_bias)
        key = self._project(f"{at}.key", x, shape.hidden, kv_width, bias=self.attention_bias)
        value = self._project(f"{at}.value", x, shape.hidden, kv_width, bias=self.attention_bias)
        if self.family == "llama":
            query = self._add(f"{at}.query.rotary", Rotary(elements=self.rows * shape.hidden), query)
            key = self._add(f"{at}.key.rotary", Rotary(elements=self.rows * kv_width), key)
        attention = AttentionProduct(
            samples=self.batch,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            queries=shape.sequence,
            keys=shape.sequence,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            causal=shape.causal,
        )
        mixed = self._add(at, attention, query, key, value)
        return self._project(f"{at}.out", mixed, shape.hidden, shape.hidden)

    def _feed_forward(self, x: int) -> int:
        return self._expert(x, f"{self.builder.block}.mlp", self.rows, experts=0)

    def _mixture(self, x: int) -> int:
        """A router, and experts that get equal shares of the tokens."""
        at, shape = f"{self.builder.block}.mlp", self.shape
        router = self._project(f"{at}.router", x, shape.hidden, shape.experts, bias=False)
        chosen = self._add(f"{at}.router.softmax", Softmax(rows=self.rows, width=shape.experts), router)
        rows = -(-self.rows * shape.active_experts // shape.experts)
        given = [self._expert(x, f"{at}.experts.{n}", rows, experts=shape.experts) for n in range(shape.experts)]
        weighted = Multiply(elements=rows * shape.experts * shape.hidden)
        together = self._add(f"{at}.weigh", weighted, chosen, *given)
        for _ in range(shape.active_experts - 1):
            together = self._add(f"{at}.combine", Add(elements=self.rows * shape.hidden), together)
        return together

    def _expert(self, x: int, at: str, rows: int, *, experts: int) -> int:
        shape = self.shape
        wide = FullyConnected(rows=rows, inputs=shape.hidden, outputs=shape.ffn, bias=self.bias)
        narrow = FullyConnected(rows=rows, inputs=shape.ffn, outputs=shape.hidden, bias=self.bias)
        function = "silu" if shape.gated else "gelu"
        up = self._add(f"{at}.gate" if shape.gated else f"{at}.up", wide, x, experts=experts)
        active = Activation(function=function, elements=rows * shape.ffn)
        inner = self._add(f"{at}.{function}", active, up, experts=experts)
        if shape.gated:
            plain = self._add(f"{at}.up", wide, x, experts=experts)
            inner = self._add(f"{at}.multiply", Multiply(elements=rows * shape.ffn), inner, plain, experts=experts)
        return self._add(f"{at}.down", narrow, inner, experts=experts)

    def _head(self, x: int) -> None:
        """Logits for every position; of a vision transformer for its class token only. BERT's come from a transformed
        state (Devlin et al. 2019), without the sentence classifier.
        """
        shape, rows = self.shape, self.rows
        if self.family == "bert":
            self.builder.block = "transform"
            x = self._project("transform", x, shape.hidden, shape.hidden)
            x = self._add("transform.gelu", Activation(function="gelu", elements=rows * shape.hidden), x)
            x = self._norm("transform.norm", x)
        else:
            self.builder.block = "norm"
            x = self._norm("norm", x)
        rows = self.batch if self.family == "vit" else rows
        self.builder.block = "head"
        # GPT's head has no bias; those of BERT and of vision transformers do.
        bias = self.family in ("bert", "vit")
        head = FullyConnected(rows=rows, inputs=shape.hidden, outputs=shape.vocab, bias=bias, tied=shape.tied)
        x = self._add("head", head, x)
        self.builder.block = "loss"
        self._add("loss", Loss(rows=rows, width=shape.vocab), x)
