"""Owners: whose are the parameters and the optimiser state, and how does an update reach every rank?"""
