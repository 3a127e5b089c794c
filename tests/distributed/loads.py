"""A module that nothing imports but the test of servers that load modules."""
