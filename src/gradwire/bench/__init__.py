"""`gradwire bench`: how fast each collective is, alone or in turns with other engines; `gradwire tune`.

Each module imports only from those above it:

    cases             what is measured: collective, dtype, reduce op, count; sizes as people write them
    expected_values   inputs whose results are known exactly, and counting wrong elements
    start_barrier     the barrier between iterations, which belongs to no engine
    engines           gradwire, Gloo and MPI, called as their users call them
    rank_process      one rank of one engine: measures a block when asked
    start_rank        the script that starts a rank in an environment that need not have this gradwire
    rivals            the other engines by name: packages, environments, settings
    installs          other installs of gradwire, by the paths of their interpreters
    commands          the command lines and environments that start ranks
    engine_processes  all ranks of one engine: starts them, asks for blocks, ends them
    interleave        the order in which engines and blocks take turns
    report            bandwidths, ratios, tables, JSON
    link_costs        `gradwire tune`: constants of this machine's links, from times

The modules up to `start_rank` run in the environments of other engines too: they import NumPy, the engine and each
other, nothing else. This file imports nothing for the same reason.
"""
