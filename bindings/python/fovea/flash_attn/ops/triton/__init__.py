"""Under the name that programs import; computed by PyTorch, without Triton."""
