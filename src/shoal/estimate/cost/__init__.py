"""What a step of a strategy costs on a cluster: time and memory, with their splits, over columns of candidates."""

from shoal.estimate.cost.constants import PHYSICS, Physics
from shoal.estimate.cost.inputs import Inputs, inputs_for
from shoal.estimate.cost.price import Prices, price
from shoal.estimate.cost.profile import Profile, gathered
from shoal.estimate.cost.profiles import GOOD, PROFILES, profile_for
from shoal.estimate.cost.rows import inputs_from_rows, read_rows

__all__ = [
    "GOOD",
    "Inputs",
    "PHYSICS",
    "PROFILES",
    "Physics",
    "Prices",
    "Profile",
    "gathered",
    "inputs_for",
    "inputs_from_rows",
    "price",
    "profile_for",
    "read_rows",
]
