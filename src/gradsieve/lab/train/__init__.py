"""The trainer: any workload with any recipe, in local rank processes or in the world that a launcher has created.

- `plan`: the settings of a run. `choice`: how it exchanges gradients, `variants`: the names of all choices.
- `world`: the ranks that a launcher has started. `launch`: starting a run on all ranks.
- `replica`: one rank's training. `run`: the loop around it, with tests and checkpoints.
- `comparison`: several choices on the same data.
- `checkpoint`, `journal`: files of a run. `probe`: measurements that the papers plot.
"""
