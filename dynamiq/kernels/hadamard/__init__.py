"""Kernels of formats that rotate whole blocks and sum integers: THC."""
