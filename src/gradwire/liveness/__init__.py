"""How ranks learn of each other's trouble: beats and who misses them, the log of calls, the verdict on what broke, the
control messages.

What decides (`detector`, `verdict`) looks at no clock; links and the time are handed in.
"""
