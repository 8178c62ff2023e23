"""Products, attention and whole layers in C for bfloat16 on the CPU, compiled at load for the processor at hand.

torch serves every processor and shape, and pays for it where a server spends its time: few rows times many weights are
read at two thirds of the speed of memory, one token of each of many sequences takes several calls for each sequence and
layer, and small products are slow. Without a compiler everything works by torch alone, slower. docs/engine.md has the
figures.
"""
