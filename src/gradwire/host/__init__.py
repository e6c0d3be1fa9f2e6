"""Provides what depends on this machine: the native core, CPUs and memory, and malloc's settings.

native_core   loads the C++ core, or reports why it is missing
machine       host and boot identity, CPUs and memory that this process may use, states of other processes
malloc        settings that keep freed memory in the process for the next training step
"""
