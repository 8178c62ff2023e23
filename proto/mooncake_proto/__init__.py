"""The wire contract of mooncake-mesh: what travels over its ZeroMQ sockets, and nothing else."""
