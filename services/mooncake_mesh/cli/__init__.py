"""The ``mooncake`` command: reads the configuration and starts one process, a whole mesh, or a look at one."""
