"""Starting, joining, watching and ending ranks. `join.join` is what a rank calls first."""

from shoal.launch.failure import RankFailed, RankHung
from shoal.launch.script import launch_script
from shoal.launch.start import run_ranks, run_worlds, warm_up

__all__ = ["RankFailed", "RankHung", "launch_script", "run_ranks", "run_worlds", "warm_up"]
