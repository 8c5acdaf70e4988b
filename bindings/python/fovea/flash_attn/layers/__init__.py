"""Layers of the package flash-attn that Fovea has: rotary."""
