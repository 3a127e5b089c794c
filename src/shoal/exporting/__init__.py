"""The way out: a trained model as plain PyTorch, safetensors, Hugging Face or torch.distributed.checkpoint files."""
