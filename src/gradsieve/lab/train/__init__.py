"""The trainer: any workload, any recipe, on local workers or in the world that a launcher has made.

`plan` is what is asked for, `exchange` how gradients travel, `world` where the ranks come from, `replica` one rank's
training, `course` the loop around it, `checkpoint` and `journal` what is kept on disk.
"""
