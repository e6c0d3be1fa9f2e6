"""Measure the speed of collectives (`gradwire bench`) and the cost of links (`gradwire tune`).

`gradwire bench` measures gradwire by itself, or in turns with other engines. Each module imports only from those above
it:

    cases             what is measured: collective, dtype, reduce op, count; parses and formats sizes
    expected_values   inputs whose results are known exactly; counts wrong elements
    start_barrier     the barrier before each iteration, the same for all engines
    engines           gradwire, Gloo and MPI, called as their users call them
    rank_process      one rank of one engine: measures blocks of iterations on request
    start_rank        the script that starts a rank, also in an environment without this gradwire
    rivals            the other engines: their packages, environments and settings
    installs          other installs of gradwire, by the paths of their interpreters
    commands          the command lines and environments that start ranks
    engine_processes  all ranks of one engine: starts them, requests blocks, ends them
    interleave        the order in which the engines take turns
    report            bandwidths, ratios, tables, JSON
    link_costs        `gradwire tune`: computes the constants of this machine's links from measured times

The modules up to `start_rank` also run in the environments of other engines. So they import only NumPy, the engine and
each other, and this file imports nothing.
"""
