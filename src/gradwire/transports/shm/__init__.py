"""Memory shared by the ranks of one host.

arena           a memory file that this process and others map
shared_memory   how ranks of a host exchange arenas and watch each other's processes
"""
