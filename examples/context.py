"""Long sequences, cut among ranks: any Hugging Face model whose attention is PyTorch's, rotary positions and all.

shoal train examples/context.py --strategy "cp(2, 'ring')"
shoal verify examples/context.py --strategy "cp(2, 'ulysses')" --batch 4
"""

from transformers import LlamaConfig

from shoal.job import from_transformers

job = from_transformers(
    LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=512,
    ),
    sequence=512,
    global_batch=4,
    steps=100,
)
