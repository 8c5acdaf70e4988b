"""Operations of the package flash-attn that Fovea has: triton.rotary."""
