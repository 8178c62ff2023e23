"""The SSD tier of a node's KVCache: blocks that left the arena, in one preallocated file.

=========== ==== ====================================================================================
records     pure bytes of the slot table: superblock and one checksummed record for each slot
slots       pure which slot holds which key, who reads or writes it, which goes first
tiering     pure which blocks leave the arena, which come back, and what a copy was worth
block_file  I/O  slots and their records, on one file each; every fault is an outcome of its slot
folder      I/O  the folder: locked, checked, preallocated
tier        I/O  threads, staging buffers and tasks around all of it
=========== ==== ====================================================================================
"""
