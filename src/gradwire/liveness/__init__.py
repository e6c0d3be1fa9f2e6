"""How ranks learn of each other's trouble: the log of calls, the verdict on what broke, the control messages.

Nothing here opens a socket or looks at a clock: links and the time are handed in.
"""
