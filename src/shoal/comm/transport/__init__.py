"""Carriers of bytes between two ranks: memory of one process, memory shared by a host, TCP between hosts."""
