"""Memory shared by the ranks of one host.

arena           memory files that several processes map
shared_memory   how the ranks of a host exchange arenas and watch each other's processes
"""
