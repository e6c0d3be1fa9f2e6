"""This machine: the native core, its CPUs and memory, and malloc's settings.

native_core   loads the C++ core, or says why it is missing
machine       host and boot identity, CPUs and memory that this process may use, states of other processes
malloc        keeps memory that a training step frees for the next step
"""
