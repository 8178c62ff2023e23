"""RDMA between two nodes, usable alone: register memory once, then read from or write to that of another process.

The modules, from what decides to what acts::

    devices  selection  topology  paths  batch  sieve     pure, over sysfs and numbers
    verbs                                                 the one home of pyverbs
    memory  endpoint  engine                              registered memory, connections, transfers
    arena                                                 what a messenger does with it

Importing ``engine`` needs pyverbs; docs/rdma.md says where it comes from.
"""
