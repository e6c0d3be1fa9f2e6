"""Runs schedules, in Python or in the native core.

plan        binds a schedule to counts and a dtype: the plan of one rank
numerics    the numeric rules that give equal expressions equal bits
python      the reference executor, over any transport
native      the fast executor: runs the same plans in the C++ core, without the GIL
fast_path   runs repeated calls with arrays of the same kind entirely in the C++ core
"""
