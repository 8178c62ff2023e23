"""A decode step on a CUDA device: attention by one kernel, and the whole of it as a graph.

Nothing here is imported on a machine without such a device, but by tests.
"""
