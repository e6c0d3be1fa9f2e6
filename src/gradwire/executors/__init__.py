"""Executors: carry out a schedule.

plan        a schedule bound to counts and a dtype: the plan of one rank
numerics    the numeric rules that make equal expressions equal bits
python      the reference executor, over any transport
native      the fast executor: the same plans in the C++ core, without the GIL
fast_path   repeated calls with arrays of the same kind, made entirely in the C++ core
"""
