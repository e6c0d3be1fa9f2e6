"""Executors run a collective's schedule on arrays. Each module imports only from those above it.

    numerics     the rules of reductions, in NumPy
    plan         a schedule bound to counts and a dtype, for one rank
    python       the reference executor, over any transport
    native       the same plans in the native core, over sockets and shared memory
    fast_path    repeated calls, made entirely in the native core
"""
