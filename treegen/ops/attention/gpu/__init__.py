"""Attention on a GPU: Triton kernels, and cuDNN for long trunks."""
