"""Attention by the kernels of flash-attn, torch and xformers."""
