"""`gradwire bench`: how fast each collective is, by itself or in turns with other engines.

    cases           what is measured: collective, dtype, reduce op, count; sizes as people write them
    values          inputs whose results are known exactly, and counting what is wrong
    line            the barrier between iterations, which belongs to no engine
    engines/        gradwire, Gloo and MPI as their users call them
    worker          one rank of one engine: asleep until asked for a block
    start           runs a worker in an environment that need not have gradwire
    rivals          the other engines: what to install for each, where, and their settings
    commands        the command lines and environments that start ranks
    crew            all ranks of one engine, as seen from outside
    conductor       whose turn it is, and how often
    report          bandwidths, ratios, tables, JSON
    tuning          `gradwire tune`: constants of this machine's links, from times

`cases`, `values`, `line`, `engines`, `worker` and `start` run in the environments of other engines too: they import
NumPy, the engine and each other, nothing else. This file imports nothing for the same reason.
"""
