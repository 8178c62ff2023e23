"""Kernels in C for bfloat16 on the CPU, compiled when a model is loaded for the processor that it will run on.

torch serves every processor and shape, and pays for it where a server spends its time: one token of each of many
sequences takes several calls for each sequence and layer, and small products of bfloat16 are slow. Without a compiler
everything works by torch alone, slower. docs/engine.md has the figures.
"""
