"""Any Hugging Face language model or classifier, from its configuration.

shoal train examples/huggingface.py --strategy "dp(2, zero=3)"
shoal train examples/huggingface.py:vit --strategy "dp(2)"
"""

from transformers import LlamaConfig, ViTConfig

from shoal.job import from_transformers

job = from_transformers(
    LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256),
    sequence=64,
)

vit = from_transformers(
    ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=7,
        num_channels=1,
        num_labels=10,
    ),
    steps=200,
)
